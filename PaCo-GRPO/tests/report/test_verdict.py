"""What a report says first, and beside its curves: of good, damaged, unfinished and several runs."""

import re
import statistics
from pathlib import Path

import pytest
import yaml
from alternatives import Alternatives
from PIL import Image

from paco_grpo.options import RunOptions, options_to_yaml
from paco_grpo.report.__main__ import main
from paco_grpo.report.page import Page, write_report
from paco_grpo.report.run import read_run
from paco_grpo.report.verdict import judge
from paco_judge.files import locked, read_json_lines, write_json_lines

METRICS = Path(__file__).parents[1] / "monitoring" / "metrics"
JUDGE = "judge: consistency"


def metrics_of(name):
    return read_json_lines(METRICS / f"{name}.jsonl")


def evaluations(rows):
    return [row for row in rows if row["phase"] == "eval"]


def write_run(folder, rows, **options):
    """A run's folder without images; ``options`` use ``__`` for dots."""
    config = yaml.safe_load(options_to_yaml(RunOptions()))
    options = {"num_epochs": rows[-1]["epoch"], "train__reward_fn": {"consistency_score": 1.0}} | (
        options
    )
    for name, value in options.items():
        *groups, last = name.split("__")
        place = config
        for group in groups:
            place = place[group]
        place[last] = value
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    write_json_lines(folder / "metrics.jsonl", rows)
    return folder


def verdict_of(folder):
    return judge(read_run(folder), Page().label)


def points_of(verdict, heading):
    return dict(verdict.points).get(heading, [])


def in_order(text, *words):
    places = [text.lower().index(word.lower()) for word in words]
    return places == sorted(places)


def alternatives_of(folder):
    """Label of each curve → its alternative text."""
    out = folder / "page.html"
    write_report(read_run(folder), out)
    texts = Alternatives(out.read_text()).texts
    pairs = [re.match(r"(.+?): (?=training|evaluation)(.*)", text).groups() for text in texts]
    return dict(pairs)


def test_a_good_run(tmp_path):
    folder = write_run(tmp_path / "run", metrics_of("good"))
    verdict = verdict_of(folder)
    assert verdict.tone == "good"
    words = (JUDGE, "rose", "0.513", "0.873", "n = 96", "nothing fell clearly", "epoch 16")
    assert in_order(verdict.headline, *words)
    assert points_of(verdict, "Fell") == points_of(verdict, "Warned") == []
    (line,) = [line for line in points_of(verdict, "Rose") if JUDGE in line]
    assert in_order(line, "0.513 ± 0.033", "0.873 ± 0.024", "+0.360 ± 0.040", "n = 96")
    curves = alternatives_of(folder)
    assert in_order(curves[JUDGE], "0.513 → 0.873", "best after epoch 16")
    assert curves["diversity"].endswith("limit 0.5")


def test_a_run_without_guards_is_not_praised_for_what_was_not_measured(tmp_path):
    """Its headline names three of its four rewards."""
    oracle = [f"oracle_{name}" for name in ("alignment", "consistency", "distinct")]
    weights = dict.fromkeys(["consistency_score", *oracle], 1.0)
    folder = write_run(tmp_path / "run", metrics_of("good"), train__reward_fn=weights)
    headline = verdict_of(folder).headline
    words = ("0.873", "0.977", "0.875", "and 1 more", "no other reward was measured")
    assert in_order(headline, *words) and "fell" not in headline


def test_a_collapsed_run(tmp_path):
    """Its reward rises, and the evaluation before the first warning is the best."""
    folder = write_run(tmp_path / "run", metrics_of("collapsed"))
    verdict = verdict_of(folder)
    assert verdict.tone == "bad"
    assert in_order(verdict.headline, JUDGE, "0.478", "0.962", "epochs 6–12", "epoch 4")
    (warned,) = points_of(verdict, "Warned")
    assert "6–12" in warned and "0.12 times" in warned  # the last value
    assert in_order(*points_of(verdict, "Best evaluation"), "epoch 4", "0.719", "epoch 12")
    curves = alternatives_of(folder)
    assert in_order(curves[JUDGE], "0.478 → 0.962", "best after epoch 4: 0.719")
    assert in_order(curves["diversity"], "0.121", "limit 0.5")
    _, _, table = (folder / "page.html").read_text().partition('<table class="measures">')
    evaluated = ("before training", "after epoch 4 (best)", "after epoch 12")
    assert in_order(table, *evaluated, JUDGE, "trained", "0.478", "0.719", "0.962", "guard")


def test_a_reward_that_rises_while_its_guard_falls(tmp_path):
    rows = metrics_of("collapsed")
    evaluations(rows)[-1]["eval/oracle_alignment_mean"] = 0.4
    folder = write_run(tmp_path / "run", rows)
    verdict = verdict_of(folder)
    assert verdict.tone == "bad"
    words = (JUDGE, "rose", "but oracle alignment fell", "0.833", "0.400", "epochs 6–12")
    assert in_order(verdict.headline, *words)
    assert verdict.headline.count("alignment") == 1 and len(points_of(verdict, "Warned")) == 2
    curve = alternatives_of(folder)["oracle alignment"]
    limit = 0.8333 - 3 * (0.02534**2 + 0.03748**2) ** 0.5
    assert in_order(curve, "0.833 → 0.4", f"limit {limit:.3g}")
    rows = metrics_of("good")
    evaluations(rows)[-1]["eval/oracle_alignment_mean"] = 0.76  # too little for a warning
    verdict = verdict_of(write_run(tmp_path / "run", rows))
    assert verdict.tone == "bad" and points_of(verdict, "Warned") == []
    assert "nothing fell" not in verdict.headline


def test_a_reward_that_falls(tmp_path):
    rows = metrics_of("good")
    first, last = evaluations(rows)
    for name in ("mean", "stderr"):
        key = f"eval/consistency_score_{name}"
        first[key], last[key] = last[key], first[key]
    last["eval/best_epoch"] = 0
    verdict = verdict_of(write_run(tmp_path / "run", rows))
    assert verdict.tone == "bad"
    words = (JUDGE, "fell", "0.873", "0.513", "against its training", "before training")
    assert in_order(verdict.headline, *words)
    assert "rose" not in verdict.headline


def test_one_where_the_reward_should_fall(tmp_path):
    weights = {"consistency_score": -2.0}
    folder = write_run(tmp_path / "run", metrics_of("good"), train__reward_fn=weights)
    assert verdict_of(folder).tone == "bad"


def set_metrics(**means):
    row = {}
    for name, (mean, error) in means.items():
        set_name, reward = name.split("__")
        row[f"set/{set_name}/{reward}_mean"] = mean
        if error is not None:
            row[f"set/{set_name}/{reward}_stderr"] = error
    return row


def test_several_prompt_sets(tmp_path):
    """Each with its own reward: one is only monitored in the other. One has a single image."""
    before = set_metrics(
        cats__ocr=(0.25, 0.02), cats__brightness=(0.7, 0.03), dogs__brightness=(0.4, None)
    )
    after = set_metrics(
        cats__ocr=(0.75, 0.03), cats__brightness=(0.5, 0.04), dogs__brightness=(0.6, None)
    )
    rows = []
    for epoch, metrics in enumerate((before, after)):
        rows.append({"epoch": epoch, "phase": "eval", "eval/num_images": 8, **metrics})
        images = [{"file": None, "dataset": "dogs", "rewards": {"brightness": 0.1}}]
        images += [{"file": None, "dataset": "cats", "rewards": {"ocr": 0.5}}] * (7 - epoch)
        images += [{"file": None, "dataset": "cats", "rewards": {"ocr": None}}] * epoch
        (tmp_path / "run" / "eval" / f"epoch_000{epoch}").mkdir(parents=True)
        write_json_lines(tmp_path / "run" / "eval" / f"epoch_000{epoch}/eval_data.jsonl", images)
    rows[-1]["set/cats/ocr_missing"] = 1 / 7
    sets = {
        "cats": {"folder": "a", "reward_fn": {"x.y:ocr": 2.0, "brightness": 0.0}},
        "dogs": {"folder": "b", "reward_fn": {}},
    }
    folder = write_run(tmp_path / "run", rows, datasets=sets, train__reward_fn={"brightness": 1.0})
    verdict = verdict_of(folder)
    assert in_order(verdict.headline, "ocr · cats", "rose", "but brightness · cats fell")
    (rose,) = points_of(verdict, "Rose")
    assert in_order(rose, "0.250 ± 0.020", "0.750 ± 0.030", "n = 7, 6")
    (unclear,) = points_of(verdict, "No clear change")
    assert in_order(unclear, "brightness · dogs", "+0.200", "n = 1") and "±" not in unclear
    assert "14%" in points_of(verdict, "Missing in the last evaluation")[0]
    assert "trained reward" in points_of(verdict, "Best evaluation")[0]  # that none measures it
    assert in_order(alternatives_of(folder)["ocr · cats"], "0.25 → 0.75")


def test_a_run_that_got_prompt_sets_when_it_was_resumed(tmp_path):
    """Its first evaluation's images have no set, so nothing says which set's reward changed."""
    before = {"eval/ocr_mean": 0.4, "eval/ocr_stderr": 0.02}
    after = set_metrics(cats__ocr=(0.5, 0.03))
    rows = []
    for epoch, metrics in enumerate((before, after)):
        rows.append({"epoch": epoch, "phase": "eval", "eval/num_images": 3, **metrics})
        evaluation = tmp_path / "run" / "eval" / f"epoch_000{epoch}"
        evaluation.mkdir(parents=True)
        Image.new("RGB", (16, 24), "red").save(evaluation / "00000.png")
        image = {"file": "00000.png", "prompt": "a cat", "seed": 7, "rewards": {"ocr": 0.25}}
        if epoch == 1:
            image["dataset"] = "cats"
        write_json_lines(evaluation / "eval_data.jsonl", [image])
    sets = {"cats": {"folder": "a", "reward_fn": {"ocr": 2.0}}}
    folder = write_run(tmp_path / "run", rows, datasets=sets)
    write_report(read_run(folder), tmp_path / "page.html")
    assert "a cat" in (tmp_path / "page.html").read_text()


def test_options_that_an_older_run_did_not_have(tmp_path):
    folder = write_run(tmp_path / "run", metrics_of("good"))
    config = yaml.safe_load((folder / "config.yaml").read_text())
    del config["datasets"], config["max_train_minutes"]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert verdict_of(folder).tone == "good"


@pytest.mark.parametrize(("is_running", "num_epochs", "size"), [(True, 8, 3), (False, 5, 2)])
def test_a_run_that_has_not_finished(tmp_path, is_running, num_epochs, size):
    """After its first evaluation, the samples of training say how it goes.

    Their prompts differ from epoch to epoch, which the errors contain.
    """
    rows = metrics_of("good")[: num_epochs + 1]
    rows[-1]["train_time"] = 239.0
    folder = write_run(tmp_path / "run", rows, num_epochs=40, max_train_minutes=4)
    with locked(folder):
        running = verdict_of(folder)
    verdict = running if is_running else verdict_of(folder)
    words = ("unning" if is_running else "topped", str(num_epochs), "40", JUDGE)
    assert in_order(verdict.headline, *words)
    epochs = [row["reward/consistency_score_mean"] for row in rows[1:]]
    means = []
    for part in (epochs[:size], epochs[-size:]):
        means.append(f"{statistics.mean(part):.3f} ± {statistics.stdev(part) / size**0.5:.3f}")
    assert in_order(verdict.headline, *[mean[:5] for mean in means])
    (line,) = [line for line in points_of(verdict, "Rose") if JUDGE in line]
    assert in_order(line, *means)
    assert "before training" in verdict.headline  # the best so far
    rows[-1]["train_time"] = 241.0
    folder = write_run(tmp_path / "run", rows, num_epochs=40, max_train_minutes=4)
    assert verdict_of(folder).headline.lower().startswith(JUDGE)


def test_without_an_evaluation(tmp_path):
    rows = [row for row in metrics_of("collapsed") if row["phase"] == "train"]
    for epoch in (3, 4, 10):
        rows[epoch - 1]["health/velocity_change"] = 0.8
    headline = verdict_of(write_run(tmp_path / "run", rows)).headline
    words = (JUDGE, "rose", "epochs 3–4, 10: the generator", "epochs 6–12: the images")
    assert in_order(headline, *words) and "est eval" not in headline
    folder = write_run(tmp_path / "run", rows[:1], num_epochs=3)
    assert verdict_of(folder).tone == "unclear"
    assert not (folder / ".lock").exists()  # a report only reads


def test_runs_side_by_side(tmp_path, capsys):
    """Of other rewards, sets and lengths; each has its verdict, and curves that both have are one."""
    rows = metrics_of("good")
    for row in evaluations(rows):
        for name in ("mean", "stderr"):
            row[f"eval/ocr_{name}"] = row.pop(f"eval/oracle_alignment_{name}")
    evaluations(rows)[0]["eval/num_images"] = 48
    rows[1]["train/clip_share"] = 0.25
    b = {"train__loss_type": "awm", "run_name": "b", "test__num_steps": 7}
    folders = [
        write_run(tmp_path / "a", metrics_of("collapsed"), train__loss_type="nft", run_name="a"),
        write_run(tmp_path / "b", rows, **b),
    ]
    assert main([*map(str, folders), "--title", "Both"]) == 0
    out = tmp_path / "a" / "compared.html"
    assert capsys.readouterr().out.strip() == str(out)
    page = out.read_text()
    for folder in folders:
        headline = verdict_of(folder).headline
        assert page.count(headline) == 1
    _, _, table = page.partition(f"<h3>{JUDGE}</h3>")
    table, _, _ = table.partition("</table>")
    of_a = ("1. a", "0.478", "0.719", "0.962", "epoch 12")  # the first, the best and the last
    assert in_order(table, *of_a, "2. b", "0.513", "0.873", "epoch 16", "48, 96")
    alternatives = Alternatives(page).texts
    (shared,) = [text for text in alternatives if text.startswith(JUDGE)]
    assert in_order(shared, "1. a 0.478 → 0.962", "best after epoch 4", "2. b 0.513 → 0.873")
    assert sum("ocr" in text for text in alternatives) == 1
    assert not any("clipped" in text for text in alternatives)  # only a report of one run has it
    _, _, differences = page.partition("Options that differ")
    words = ("test.num_steps", "what is evaluated", "train.loss_type", "nft", "awm")
    assert in_order(differences, *words) and "run_name" not in page
