"""Labels of a judge's mistakes: build-dataset --mend, and the training that goes on from a judge."""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from pairing_tools import build, noise, write_lines
from training_tools import TIMEOUT, environment_of, losses

from paco_judge.errors import UserError
from paco_judge.questions import load_question, theme_question
from paco_judge.scorer import JudgeScorer
from paco_reward.cli import main
from paco_reward.datasets import labeled_pairs
from paco_reward.export import export, synthetic_pairs
from paco_reward.pairing.mend import kept_back
from paco_reward.pairing.select import LabeledPair

ROOT = Path(__file__).resolve().parents[1]
MENDED = "consistency_reward_mend_train"
KEPT_BACK = "consistency_reward_mend_test"


def mend(file: Path, output: Path, beside: str = "pairs", **options: object) -> dict:
    """build-dataset --mend; test_share None: without the option."""
    options = {"test_share": None, "sets_per_prompt": None} | options
    return build(None, output, mend=file, beside=beside, **options)


@pytest.fixture
def old(data_dir, tmp_path) -> Path:
    """A data set of somebody else's with 1,200 rows, and one of ten."""
    folder = Path(shutil.copytree(data_dir, tmp_path / "old"))
    rows = json.loads((folder / "pairs.json").read_text())
    (folder / "pairs.json").write_text(json.dumps(rows * 75))
    return folder


@pytest.fixture
def labels(tmp_path) -> Path:
    """97 No and 3 Yes, as `paco-reward suspects` and a person write them."""
    rows = []
    (tmp_path / "suspects").mkdir()
    for number in range(100):
        row = {"label": "Yes" if number % 40 == 3 else "No", "theme": f"a fox, {number % 7}"}
        for key, seed in (("image1", 3), ("image2", 4)):
            row[key] = f"suspects/{key}_{number}.png"
            noise(seed, number).save(tmp_path / row[key])
        rows.append(row | {"chosen_by": "near 0.5", "p_yes": 0.4})
    return write_lines(tmp_path / "labels.jsonl", rows)


def answers(folder: Path, name: str) -> Counter:
    """How often each pair is there: two images, the question and the answer."""
    rows = json.loads((folder / f"{name}.json").read_text())
    texts = [[message["content"] for message in row["messages"]] for row in rows]
    return Counter((*row["images"], *words) for row, words in zip(rows, texts, strict=True))


def test_no_label_is_left_out_and_together_they_are_a_tenth(old, labels, caplog):
    caplog.set_level("INFO")
    before = {file: file.read_bytes() for file in old.rglob("*.*")}
    counts = mend(labels, old, "pairs, held_out")["counts"]
    seen = answers(old, MENDED)
    # 1,210 others / 9 / 100 labels
    assert counts["times_repeated"] == 1 and set(seen.values()) == {1}
    assert Counter(answer for *_, answer in seen) == {"No": 97, "Yes": 3}
    assert "3 Yes and 97 No" in caplog.text and "100 of the 1310" in caplog.text
    assert "not used" not in caplog.text
    assert not (old / f"{KEPT_BACK}.json").exists()
    changed = {file for file, content in before.items() if file.read_bytes() != content}
    assert {file.name for file in changed} == {"dataset_info.json"}
    info = json.loads((old / "dataset_info.json").read_text())
    assert set(info) == {"pairs", "held_out", MENDED}
    pairs, _ = labeled_pairs(old, MENDED)
    assert {row[2] for row in pairs.rows} == {theme_question(f"a fox, {n}") for n in range(7)}


def test_labels_that_are_kept_back_are_whole_groups_and_never_repeated(old, labels, caplog):
    caplog.set_level("INFO")
    rows = labels.read_text().splitlines(keepends=True)[:40]
    counts = mend(write_lines(labels, rows), old, test_share=0.3)["counts"]
    train, test = answers(old, MENDED), answers(old, KEPT_BACK)
    assert len(train) == counts["labels_for_training"] == 28
    assert len(test) == counts["labels_for_testing"] == 12
    assert set(train.values()) == {counts["times_repeated"]} == {5}  # 1,200 / 9 / 28 = 4.8
    assert set(test.values()) == {1} and not {key[0] for key in train} & {key[0] for key in test}
    assert "each 5 times: 140 of the 1340" in caplog.text


def test_the_seed_chooses_the_labels_that_are_kept_back():
    pairs = [LabeledPair(f"{n}a", f"{n}b", "q", True, "pair", f"{n}") for n in range(20)]
    chosen = {frozenset(kept_back(pairs, {}, 0.3, seed)) for seed in range(5)}
    assert len(chosen) == 5 and set(map(len, chosen)) == {6}


def sides(output: Path) -> dict[int, str]:
    """train or test of each label, by the number in its question; no image is on both sides."""
    parts = {}
    images = []
    for name, part in ((MENDED, "train"), (KEPT_BACK, "test")):
        keys = answers(output, name)
        parts |= {int(re.search(r"owl (\d+)", question)[1]): part for *_, question, _ in keys}
        images.append({image for first, second, *_ in keys for image in (first, second)})
    assert not images[0] & images[1]
    return parts


def test_labels_of_a_later_call_leave_the_earlier_ones_where_they_were(old, labels):
    """A group that joins both sides is for training, as a part of it was."""
    rows = []
    for number, line in enumerate(labels.read_text().splitlines()):
        rows.append(json.loads(line) | {"theme": f"owl {number}"})
    mend(write_lines(labels, rows[:40]), old, test_share=0.3)
    before = sides(old)
    trained = min(number for number in before if before[number] == "train")
    joined, grown, *_ = (number for number in before if before[number] == "test")
    joins = rows[joined] | {"image2": rows[trained]["image1"], "theme": "owl 100"}
    grows = rows[50] | {"image2": rows[grown]["image1"], "theme": "owl 101"}
    mend(write_lines(labels, [*rows, joins, grows]), old, test_share=0.3, seed=6)
    after = sides(old)
    moved = [number for number in before if after[number] != before[number]]
    assert moved == [joined] and after[joined] == after[100] == "train"
    assert after[50] == after[101] == after[grown] == "test"
    assert list(after.values()).count("test") == 31  # 0.3 · 102

    mend(write_lines(labels, rows[:60]), old)
    kept = {number: part for number, part in after.items() if number < 60}
    assert sides(old) == kept


def test_labels_that_share_an_image_cannot_be_kept_back(old, labels, caplog):
    rows = []
    for line in labels.read_text().splitlines()[:20]:
        rows.append(json.loads(line) | {"image2": "suspects/image2_0.png"})
    mend(write_lines(labels, rows), old, test_share=0.4)
    assert "--test_share" in caplog.text
    assert not (old / f"{KEPT_BACK}.json").exists()


def test_pairs_beside_with_the_other_label_are_named(old, labels, caplog):
    """In either order of the images; an equal label and another question are no contradiction."""
    mend(labels, old)
    rows = [json.loads(line) for line in labels.read_text().splitlines()[:6]]
    rows[0] |= {"label": "Yes"}
    rows[1] |= {"label": "Yes", "image1": rows[1]["image2"], "image2": rows[1]["image1"]}
    rows[2] |= {"label": "Yes", "theme": "a goose"}
    rows[3] |= {"label": "No"}
    mend(write_lines(labels.with_name("second.jsonl"), rows), old, f"pairs,{MENDED}", name="again")
    assert "3 pairs of --beside have the other label" in caplog.text
    caplog.clear()
    mend(write_lines(labels, rows[4:]), old, f"pairs,{MENDED}", name="agreeing")
    assert "other label" not in caplog.text


def test_labels_of_edits(old, tmp_path, caplog):
    """Both questions about each edit, also of an unchanged picture; its reverse is another edit."""
    rows = []
    for number in range(6):
        row = {"source": f"{number}.png", "edited": f"{number}_edited.png"}
        row |= {"instruction": f"add hat {number}", "consistency": number > 0, "follows": False}
        noise(5, number).save(tmp_path / row["source"])
        noise(5, max(number, 1)).save(tmp_path / row["edited"])
        rows.append(row)
    mend(write_lines(tmp_path / "edits.jsonl", rows), old, name="own")
    seen = answers(old, "own_mend_train")
    assert Counter(answer for *_, answer in seen) == {"Yes": 5, "No": 7}
    assert set(seen.values()) == {11}  # 1,200 / 9 / 12
    pairs, _ = labeled_pairs(old, "own_mend_train")
    templates = [load_question(f"editing_{name}") for name in ("consistency", "instruction")]
    asked = {
        template.text(instruction=row["instruction"]) for row in rows for template in templates
    }
    assert {row[2] for row in pairs.rows} == asked

    turned = rows[0] | {"source": rows[0]["edited"], "edited": rows[0]["source"], "follows": True}
    file = write_lines(tmp_path / "turned.jsonl", [turned | {"consistency": True}])
    mend(file, old, "own_mend_train", name="turned")
    assert "other label" not in caplog.text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"beside": "nowhere"}, "nowhere"),
        ({"beside": None}, "--beside"),
        ({"beside": f"pairs, {MENDED}"}, "--name"),
        ({"pairs": "labels.jsonl"}, "--pairs"),
        ({"reasons": True}, "--server"),
    ],
)
def test_what_mending_does_not_take_is_one_sentence(old, labels, change, named):
    files = sorted(old.rglob("*"))
    with pytest.raises(UserError, match=named):
        mend(labels, old, **({"beside": "pairs"} | change))
    assert sorted(old.rglob("*")) == files


def test_accuracy_before_and_after(answering_judge, adapter_dir, data_dir, tmp_path, capsys):
    """A row for each data set; another judge's numbers on other data are refused."""
    words = ["accuracy", "--model", str(answering_judge), "--dataset_dir", str(data_dir)]
    both = [*words, "--dataset", "pairs,held_out"]
    reports = []
    for name, more in (("before", []), ("after", ["--adapter", str(adapter_dir)])):
        file = tmp_path / f"{name}.json"
        assert main([*both, *more, "--output", str(file)]) == 0
        reports.append(json.loads(file.read_text())["kinds"])
    capsys.readouterr()
    before = ["--before", str(tmp_path / "before.json")]
    assert main([*both, "--adapter", str(adapter_dir), *before]) == 0
    _, _, *rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    for row, (name, count) in zip(rows, (("pairs", 16), ("held_out", 10)), strict=True):
        numbers = [reports[i][name][key] for key in ("accuracy", "auc") for i in (0, 1)]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells == [name, str(count), *(f"{number:.3f}" for number in numbers)]
    assert main([*words, "--dataset", "pairs", *before]) == 1


TRAIN = """
import sys, yaml
from paco_reward.cli import main
for arguments in yaml.safe_load(sys.argv[1]):
    assert main(["train", "config/paco_reward_mend.yaml", *arguments]) == 0
"""


@pytest.mark.slow
def test_training_goes_on_from_the_judge(answering_judge, adapter_dir, data_dir, tmp_path):
    """From an adapter, which is trained on, and from the merged judge, which gets a new LoRA.

    Both begin at the judge's loss, and what is exported has the trained judge's scores.
    """
    merged = tmp_path / "merged"
    export(str(answering_judge), str(adapter_dir), merged)
    options = {"dataset_dir": data_dir, "dataset": "pairs", "eval_dataset": "held_out"}
    options |= {
        "eval_strategy": "no",
        "bf16": False,
        "cutoff_len": 512,
        "preprocessing_num_workers": 1,
        "dataloader_num_workers": 0,
    }
    options |= {"use_cpu": True, "max_steps": 3, "logging_steps": 1, "disable_shuffling": True}
    options |= {"global_batch_size": 4, "per_device_train_batch_size": 4, "warmup_ratio": 0}
    options |= {"save_strategy": "no", "learning_rate": 3e-3}
    starts = {
        "adapter": {"model_name_or_path": answering_judge, "adapter_name_or_path": adapter_dir},
        "merged": {"model_name_or_path": merged, "lora_rank": 3},
    }
    commands = []
    for name, start in starts.items():
        values = options | start | {"output_dir": tmp_path / f"from_{name}"}
        commands.append([f"{key}={value}" for key, value in values.items()])
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, json.dumps(commands)],
        cwd=ROOT,
        env=environment_of(tmp_path),
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0

    def scores(*judge: Path) -> np.ndarray:
        verdicts = JudgeScorer.from_pretrained(*judge).score(synthetic_pairs(9), top=None)
        return np.array([verdict.p_yes for verdict in verdicts])

    first_losses = [losses(tmp_path / f"from_{name}")[0] for name in starts]
    assert first_losses[0] == pytest.approx(first_losses[1], abs=1e-4)
    of_judge = scores(merged)
    for name, base in (("adapter", answering_judge), ("merged", merged)):
        trained = tmp_path / f"from_{name}"
        rank = json.loads((trained / "adapter_config.json").read_text())["r"]
        assert rank == {"adapter": 4, "merged": 3}[name]
        exported = tmp_path / f"exported_{name}"
        export(str(base), str(trained), exported)
        np.testing.assert_allclose(scores(exported), scores(base, trained), atol=1e-4)
        assert np.abs(scores(exported) - of_judge).max() > 1e-3
