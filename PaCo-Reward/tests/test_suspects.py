"""`paco-reward suspects`: which pairs of a run a person is asked about."""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import fake_judge
from pairing_tools import build, digest, judge_model, noise, p_yes_of, write_lines
from PIL import Image

from paco_judge.encoders import Encoder
from paco_judge.files import read_json_lines
from paco_judge.images import load_image
from paco_judge.questions import load_question, theme_question
from paco_reward import suspects
from paco_reward.cli import main

MODEL = "Paco-Reward-7B"
IMAGES = ("image1", "image2")
ROSE = {0: 0.0, 9000: 1.0, 12000: 0.3}  # by epoch, how much the scores are higher than at first
INSTRUCTIONS = ("make it red", "add a hat", "remove the car", "at night")


def save_run(folder: Path, prompts: list[tuple], epochs=tuple(ROSE)) -> Path:
    """A run with evaluations; ``prompts``: (prompt, open, columns of panels, pictures, reward)."""
    for epoch in epochs:
        rows = []
        evaluation = folder / "eval" / f"epoch_{epoch:04d}"
        (evaluation / "references").mkdir(parents=True)
        for item, (prompt, is_open, columns, count, reward) in enumerate(prompts):
            for repeat in range(count):
                number = len(rows)
                name = f"{number:05d}.png"
                noise(epoch, number, width=32 * columns).save(evaluation / name)
                score = 0.3 + 0.02 * item + ROSE[epoch] * (1 + number % 5) / 5
                row = {"file": name, "reference": None, "prompt": prompt, "item_id": item}
                row |= {"rewards": {reward: score, "other": -score}}
                row |= {"seed": 70 + number, "open": is_open}
                if reward == "consistency_for_editing":
                    row["reference"] = f"references/{name}"
                    noise(99, item).save(evaluation / row["reference"])
                rows.append(row)
        write_lines(evaluation / "eval_data.jsonl", rows)
    return folder


def grid(theme: str, columns: int) -> str:
    panels = ". ".join(f"PANEL-{number}: scene {number}" for number in range(1, columns + 1))
    return f"a 1x{columns} grid of {theme}. {panels}."


@pytest.fixture
def grids(tmp_path) -> Path:
    """Nine pictures with three or four panels, one without panels, one that was not saved."""
    reward = "consistency_score"
    prompts = [(grid(f"fox {number}", 3), False, 3, 1, reward) for number in range(4)]
    prompts += [(grid("an open boat", 4), True, 4, 3, reward), ("a mill", False, 1, 1, reward)]
    prompts += [(grid(f"owl {number}", 4), False, 4, 1, reward) for number in range(3)]
    run = save_run(tmp_path / "run", prompts)
    file = run / "eval" / "epoch_12000" / "eval_data.jsonl"
    rows = read_json_lines(file)
    rows[-1]["file"] = None
    write_lines(file, rows)
    return run


def choose(run: Path, output: Path, server, *more: object) -> tuple[list[dict], list[dict]]:
    """The rows of FILE, and what the judge was asked."""
    before = len(server.requests)
    words = ["suspects", run, "--output", output, "--server", server.url, *more]
    assert main(list(map(str, words))) == 0
    return read_json_lines(output), server.requests[before:]


@pytest.fixture
def server():
    with fake_judge.FakeJudge(judge_model) as judge:
        yield judge


def p_yes(first: Image.Image, second: Image.Image, question: str) -> float:
    return p_yes_of(digest(first), digest(second), question, MODEL)


def test_a_fifth_is_chosen_for_each_reason(grids, tmp_path, server, capsys):
    output = tmp_path / "new" / "suspects.jsonl"
    rows, requests = choose(grids, output, server, "--n", 20)
    # 4 pictures with 3 pairs, 5 with 6, and two pairs of panels of the open prompt's neighbors
    printed = capsys.readouterr().out
    assert f"{3 * (12 + 30 + 2)} questions" in printed
    assert printed.endswith(f"paco-reward rank --pairs {output} --output labeled\n")
    assert len(requests) == 3 * 44
    assert Counter(row["chosen_by"] for row in rows) == dict.fromkeys(suspects.REASONS, 4)
    for row in rows:
        images = [load_image(output.parent / row[name]) for name in IMAGES]
        assert row["p_yes"] == pytest.approx(p_yes(*images, theme_question(row["theme"])))
    worth: dict[str, dict] = {}  # by theme and pair
    for suspect in suspects.read_run(grids)[0]:
        first, second = (panel.cut() for panel in suspect.panels)
        question = theme_question(suspect.about)
        value = p_yes(first, second, question)
        worth.setdefault(suspect.about, {})[digest(first), digest(second)] = {
            suspects.UNSURE: -abs(value - 0.5),
            suspects.ORDERS: abs(value - p_yes(second, first, question)),
            suspects.QUESTIONS: abs(value - p_yes(first, second, load_question("pair").text())),
            suspects.HIGHEST: value,
        }
    for row in rows:
        of_theme = worth[row["theme"]]
        shown = tuple(digest(load_image(output.parent / row[name])) for name in IMAGES)
        if row["chosen_by"] != suspects.RISE:
            assert shown == max(of_theme, key=lambda pair: of_theme[pair][row["chosen_by"]])
        del of_theme[shown]
    for reason in suspects.REASONS:  # spread over prompts
        themes = [row["theme"] for row in rows if row["chosen_by"] == reason]
        assert len(set(themes)) == 4
    shown = {row[name] for row in rows for name in IMAGES}
    folder = output.with_suffix("")
    assert {f"{folder.name}/{file.name}" for file in folder.glob("*.png")} == shown
    # What people answer is what build-dataset reads.
    for number, row in enumerate(rows):
        row["label"] = ("Yes", "No")[number % 2]
    numbers = build(None, tmp_path / "data", pairs=write_lines(output, rows), test_share=0.0)
    assert numbers["counts"]["pairs"] == 20


def test_of_pictures_that_rose_most(grids, tmp_path, server):
    """Since the first evaluation; every fifth picture rises five times as much."""
    # A copy that somebody keeps is no evaluation of the run.
    shutil.copytree(grids / "eval" / "epoch_0000", grids / "eval" / "epoch_12000_keep")
    rows, _ = choose(grids, tmp_path / "a.jsonl", server, "--n", 10)
    rose = {row["theme"] for row in rows if row["chosen_by"] == suspects.RISE}
    # Pictures 4 (open boat) and 9 (an owl, as the boat has three and the mill one).
    assert rose <= {"a 1x4 grid of an open boat.", "a 1x4 grid of owl 1."}
    rows, _ = choose(grids, tmp_path / "other.jsonl", server, "--n", 10, "--reward", "other")
    rose = {row["theme"] for row in rows if row["chosen_by"] == suspects.RISE}
    assert rose <= {"a 1x3 grid of fox 0.", "a 1x4 grid of an open boat."}  # pictures 0 and 5
    for epoch in ("0000", "9000"):
        (grids / "eval" / f"epoch_{epoch}" / "eval_data.jsonl").unlink()
    rows, _ = choose(grids, tmp_path / "b.jsonl", server, "--n", 10)
    assert len(rows) == 10 and suspects.RISE not in {row["chosen_by"] for row in rows}


def test_answers_are_kept_and_a_file_is_not_overwritten(grids, tmp_path, server, capsys):
    output = tmp_path / "suspects.jsonl"
    (tmp_path / "suspects").mkdir()
    others_picture = tmp_path / "suspects" / "sheet.png"
    others_picture.write_bytes(b"of somebody else")
    first, asked = choose(grids, output, server, "--n", 7, "--asked", 15)
    assert len(asked) == 3 * 15
    assert others_picture.exists()
    assert main(["suspects", str(grids), "--output", str(output), "--server", server.url]) == 1
    assert str(output) in capsys.readouterr().err
    output.unlink()
    again, requests = choose(grids, output, server, "--n", 7, "--asked", 15)
    assert again == first and not requests


def test_near_duplicates_are_not_asked_about(tmp_path, server):
    """Equal panels of one grid, and a pair that another picture repeats."""
    prompt = grid("a fox", 3)
    run = save_run(tmp_path / "run", [(prompt, False, 3, 4, "consistency_score")])
    folder = run / "eval" / "epoch_12000"
    panels = [noise(1, number) for number in range(2)]
    for name, shown in (("00000", (0, 1, 0)), ("00001", (1, 0, 1))):
        picture = Image.new("RGB", (96, 32))
        for place, number in enumerate(shown):
            picture.paste(panels[number], (32 * place, 0))
        picture.save(folder / f"{name}.png")
    rows, requests = choose(run, tmp_path / "suspects.jsonl", server, "--question", "pair")
    assert len(rows) == 1 + 6 and len(requests) == 2 * len(rows)  # two orders of one question
    assert not any("theme" in row for row in rows)


def test_edits_are_shown_beside_their_originals(tmp_path, server, capsys):
    """Both questions about them; an edit that changes nothing is no near-duplicate."""
    prompts = [(text, False, 1, 2, "consistency_for_editing") for text in INSTRUCTIONS]
    run = save_run(tmp_path / "run", prompts)
    folder = run / "eval" / "epoch_12000"
    (folder / "00003.png").write_bytes((folder / "references" / "00003.png").read_bytes())
    for kind in ("", "references"):  # another instruction about the same pictures
        (folder / kind / "00007.png").write_bytes((folder / kind / "00005.png").read_bytes())
    originals = {digest(noise(99, item)) for item in range(len(prompts))}
    output = tmp_path / "edits.jsonl"
    rows, requests = choose(run, output, server, "--n", 30)
    assert len(rows) == 8 and len(requests) == 16
    assert f"paco-reward rank --editing {output} --output labeled\n" in capsys.readouterr().out
    assert {row["chosen_by"] for row in rows} == set(suspects.REASONS) - {suspects.ORDERS}
    for row in rows:
        source, edited = (load_image(output.parent / row[name]) for name in ("source", "edited"))
        assert digest(source) in originals
        answers = []
        for name in ("editing_consistency", "editing_instruction"):
            question = load_question(name).text(instruction=row["instruction"])
            answers.append(p_yes(source, edited, question))
        assert row["p_yes"] == pytest.approx(np.sqrt(np.prod(answers)))
    for number, row in enumerate(rows):
        row |= {"consistency": number % 2, "follows": number % 3 > 0}
    file = write_lines(tmp_path / "edits.jsonl", rows)
    counts = build(None, tmp_path / "data", editing=file, test_share=0.0)["counts"]
    assert counts["edits"] == 8


def test_features_choose_among_the_pairs_with_the_highest_p_yes(tmp_path):
    """A pair of like colors is left to the last; one with a lower P(Yes) is not compared."""

    def mean_color(image: Image.Image) -> torch.Tensor:
        return torch.from_numpy(np.asarray(image).mean((0, 1)))

    encoder = Encoder(None, mean_color, lambda colors: colors, "cpu")
    pairs = []
    colors = [("red", "darkred", 0.97), ("red", "magenta", 0.9), ("red", "yellow", 0.95)]
    colors += [("lime", "blue", 0.2), ("red", "lime", 0.1)]
    for number, (first, second, value) in enumerate(colors):
        images = (f"{number}a.png", f"{number}b.png")
        for name, color in zip(images, (first, second), strict=True):
            Image.new("RGB", (8, 8), color).save(tmp_path / name)
        pair = suspects.Suspect((number,), "", (), images=images, p_yes=value)
        pair.worth = {suspects.HIGHEST: value, suspects.UNSURE: -1.0}
        pairs.append(pair)
    suspects.compare_features(pairs, encoder, tmp_path, count=2)
    assert pairs.pop().worth == {suspects.UNSURE: -1.0}
    chosen = suspects.choose(pairs, 3)
    assert [pair.images[0] for pair, reason in chosen if reason == suspects.FAR_APART] == ["1a.png"]


def test_a_reason_takes_what_is_worth_most_first_one_of_each_prompt(grids):
    """What a reason lacks goes to those after it, and no pair is taken twice."""
    found, _ = suspects.read_run(grids)
    for number, suspect in enumerate(found):
        suspect.worth = {suspects.ORDERS: -number, suspects.HIGHEST: number % 7}
        suspect.p_yes = 1 - number / 100
    found[4].worth[suspects.RISE] = 0.4
    chosen = suspects.choose(found, 13)
    by_reason: dict[str, list] = {}
    for suspect, reason in chosen:
        by_reason.setdefault(reason, []).append(found.index(suspect))
    # Of three for each picture with three panels, six for each with four, two between pictures.
    assert by_reason[suspects.ORDERS] == [0, 3, 6, 9, 12]
    assert by_reason[suspects.RISE] == [4]
    assert len(by_reason[suspects.HIGHEST]) == 7
    assert by_reason[suspects.HIGHEST][:2] == [13, 34]


def test_pairs_of_an_open_prompts_pictures(grids):
    """Of one and the next, and of different panels."""
    pairs, _ = suspects.read_run(grids)
    shown = [suspect.panels for suspect in pairs]
    between = [(first, second) for first, second in shown if first.file != second.file]
    files = [(first.file.stem, second.file.stem) for first, second in between]
    assert files == [("00004", "00005"), ("00005", "00006")]
    assert all(first.number != second.number for first, second in between)


def test_the_judge_is_asked_equally_much_about_each_prompt(grids):
    """The seed decides about which pairs."""
    pairs, _ = suspects.read_run(grids)
    asked = [suspects.spread(pairs, 14, seed) for seed in (1, 2)]
    assert asked[0] != asked[1]
    for some in asked:
        assert set(Counter(suspect.prompt for suspect in some).values()) == {2}
        assert some == sorted(some, key=pairs.index)


def test_a_pair_without_all_its_answers_is_left_out(grids, tmp_path):
    def model(number, request):
        is_silent = load_question("pair").text() in fake_judge.request_content(request)[1]
        if is_silent and number % 3 == 0:
            return 400, {"error": {"message": "no"}}, {}
        return judge_model(number, request)

    with fake_judge.FakeJudge(model) as server:
        rows, requests = choose(grids, tmp_path / "suspects.jsonl", server)
        assert 0 < len(rows) < 44 and len(requests) == 3 * 44


@pytest.mark.parametrize("missing", ["evaluations", "pictures", "panels"])
def test_a_run_without_pairs_is_one_sentence(tmp_path, capsys, missing):
    """Before the server is asked."""
    run = save_run(tmp_path / "run", [("a mill", False, 1, 3, "consistency_score")], epochs=(0,))
    file = run / "eval" / "epoch_0000" / "eval_data.jsonl"
    if missing == "evaluations":
        file.unlink()
    elif missing == "pictures":
        write_lines(file, [row | {"file": None} for row in read_json_lines(file)])
    words = ["suspects", str(run), "--output", str(tmp_path / "a.jsonl"), "--server", "http://none"]
    assert main(words) == 1
    assert str(run) in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
