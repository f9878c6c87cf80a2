"""build-dataset --pairs: a user's labeled pairs, from the file to a training step."""

import csv
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fakes import fake_judge
from pairing_tools import all_bytes, build, rows, write_lines
from PIL import ExifTags, Image
from training_tools import adapter, run_processes, train_config

from paco_judge.errors import UserError
from paco_judge.questions import load_question, theme_question
from paco_reward.datasets import check_data, labeled_pairs, load_examples

COUNT = 20


def own(file: Path, output: Path, **options: object) -> dict:
    return build(None, output, pairs=file, **{"sets_per_prompt": None} | options)


def problem(file: Path, output: Path, **options: object) -> str:
    with pytest.raises((UserError, OSError)) as caught:
        own(file, output, **options)
    assert not output.exists()
    return str(caught.value)


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    """images/0a.png, 0b.png, 1a.png, …"""
    folder = tmp_path / "mine"
    (folder / "images").mkdir(parents=True)
    for number in range(COUNT):
        tiny.picture(2 * number).save(folder / "images" / f"{number}a.png")
        tiny.picture(2 * number + 1).save(folder / "images" / f"{number}b.png")
    return folder


def row(number: int, label: object = None, **values: object) -> dict:
    if label is None:
        label = ("Yes", "No")[number % 2]
    images = {"image1": f"images/{number}a.png", "image2": f"images/{number}b.png"}
    return images | {"label": label} | values


@pytest.fixture
def pairs() -> list[dict]:
    """Rows with and without themes and reasons."""
    lines = []
    for number in range(COUNT):
        theme = "" if number % 3 == 0 else 'a "red" fox, running'
        reason = "" if number % 4 < 2 else "both show what it says."
        lines.append(row(number, theme=theme, reason=reason))
    return lines


def test_json_lines_json_and_csv_make_the_same_data_set(folder, pairs, tmp_path):
    """Also with a byte order mark, and names of columns in capitals."""
    write_lines(folder / "pairs.jsonl", pairs)
    (folder / "pairs.json").write_text("\ufeff" + json.dumps(pairs))
    with (folder / "pairs.csv").open("w", encoding="utf-8-sig", newline="") as file:
        names = {name: name.capitalize() for name in pairs[0]}
        table = csv.writer(file)
        table.writerow(names.values())
        table.writerows(line.values() for line in pairs)
    built = {}
    for suffix in ("jsonl", "json", "csv"):
        stats = own(folder / f"pairs.{suffix}", tmp_path / suffix)
        built[suffix] = all_bytes(tmp_path / suffix)
    assert built["jsonl"] == built["json"] == built["csv"]
    assert stats["counts"] == {"pairs": COUNT}
    assert stats["datasets"]["consistency_reward_train"]["yes"] == COUNT / 2 - 2
    assert stats["datasets"]["consistency_reward_test"]["no"] == 2


def test_the_training_file_asks_what_the_reward_asks(folder, pairs, tmp_path):
    own(write_lines(folder / "pairs.jsonl", pairs), tmp_path / "out", test_share=0.0)
    examples = load_examples(tmp_path / "out", "consistency_reward_train")
    prefix = "<image><image>"
    assert {example.prompt for example in examples} == {
        prefix + theme_question('a "red" fox, running'),
        prefix + load_question("pair").text(),
    }
    answers = Counter(example.answer for example in examples)
    assert set(answers) == {
        "Yes",
        "No",
        "Yes. Both show what it says.",
        "No. Both show what it says.",
    }
    assert sum(answers.values()) == COUNT
    (folder / "mine.txt").write_text("Same fox?")
    stats = own(folder / "pairs.jsonl", tmp_path / "mine", question=folder / "mine.txt")
    examples = load_examples(tmp_path / "mine", "consistency_reward_train")
    assert {example.prompt for example in examples} == {f"{prefix}Same fox?"}
    assert [asked["template"] for asked in stats["asked"]["questions"]] == ["Same fox?"]


@pytest.mark.parametrize(
    ("label", "answer"),
    [("Yes", "Yes"), ("no", "No"), (True, "Yes"), (0, "No"), ("FALSE", "No"), (1.0, "Yes")],
)
def test_labels(folder, tmp_path, label, answer):
    lines = [row(0, label), *(row(number, "Yes") for number in range(1, 9))]
    lines += [row(number, "No") for number in range(9, 18)]
    own(write_lines(folder / "pairs.jsonl", lines), tmp_path / "out", test_share=0.0)
    found = row_of(tmp_path / "out", folder / "images" / "0a.png")
    assert found["messages"][1]["content"] == answer


def row_of(output: Path, image: Path) -> dict:
    """The row of the training file whose first image is a copy of ``image``."""
    for line in rows(output, "consistency_reward_train"):
        if (output / line["images"][0]).read_bytes() == image.read_bytes():
            return line
    raise LookupError(image)


def test_scores_become_labels(folder, tmp_path):
    scores = [1, 0.9, 0.55, 0.54, 0.5, 0.46, 0.45, 0.1, 0, 0.3]
    lines = [row(number, score=score) | {"label": None} for number, score in enumerate(scores)]
    file = write_lines(folder / "pairs.jsonl", lines)
    stats = own(file, tmp_path / "out", test_share=0.0)
    assert stats["counts"] == {"pairs": 10, "unclear": 3, "unbalanced": 1}
    numbers = stats["datasets"]["consistency_reward_train"]
    assert numbers["yes"] == numbers["no"] == 3
    assert own(file, tmp_path / "all", test_share=0.0, min_gap=0)["counts"].get("unclear") is None


def test_every_pair_about_one_image_trains_and_that_is_said(folder, tmp_path, caplog):
    lines = [row(number) | {"image1": "images/0a.png"} for number in range(COUNT)]
    stats = own(write_lines(folder / "pairs.jsonl", lines), tmp_path / "out")
    assert "no pairs for testing" in caplog.text
    assert list(stats["datasets"]) == ["consistency_reward_train"]


def test_a_large_group_of_connected_images_does_not_become_the_test_set(folder, tmp_path):
    lines = [row(number) | {"image1": "images/0a.png"} for number in range(12)]
    lines += [row(number) for number in range(12, COUNT)]
    file = write_lines(folder / "pairs.jsonl", lines)
    for seed in range(5):
        stats = own(file, tmp_path / str(seed), seed=seed, test_share=0.1)
        assert stats["datasets"]["consistency_reward_test"]["pairs"] == 2


def test_repeated_pairs_count_once_and_contradicting_ones_not_at_all(folder, tmp_path):
    lines = [row(number) for number in range(8)]
    lines += [row(0), row(1), row(2, "No"), row(3, "Yes")]
    stats = own(write_lines(folder / "pairs.jsonl", lines), tmp_path / "out", test_share=0.0)
    assert stats["counts"] == {"pairs": 12, "repeated": 2, "repeated_disputed": 4}
    assert stats["datasets"]["consistency_reward_train"]["pairs"] == 6


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"image2": "images/none.png"}, "images/none.png"),
        ({"image2": "images/../images/1a.png"}, "the same image"),
        ({"image2": "pairs.jsonl"}, "PNG"),
        ({"image1": None}, "no image1 .*image2, label"),
        ({"label": "maybe"}, "'maybe'"),
        ({"label": ""}, "label or a score"),
        ({"score": 0.3}, "label or a score"),
        ({"label": None, "score": 4}, r"score 4 .*\(score - 1\) / 4"),
        ({"label": None, "score": float("nan")}, "score nan"),
        ({"theme": "an <image> of a cat"}, "theme contains <image>"),
        ({"reason": "yes: both show it."}, "reason"),
    ],
)
def test_problems_of_a_row(folder, pairs, tmp_path, change, named):
    """The message names the row, and how many others; nothing is written."""
    pairs[1] |= change
    pairs[5]["label"] = "?"
    message = problem(write_lines(folder / "pairs.jsonl", pairs), tmp_path / "out")
    assert "pairs.jsonl row 2: " in message and "1 more rows" in message
    assert re.search(named, message)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("pairs.jsonl", "", ""),
        ("pairs.csv", "\ufeffimage1,image2,label\n", ""),
        ("pairs.json", "{}", "list of pairs"),
        ("pairs.jsonl", "{x", "line 1"),
        ("pairs.csv", "image1;image2;label\na.png;b.png;Yes\n", "image1;image2;label"),
        ("pairs.csv", "image1,image2,label,theme\na,b,Yes,a fox, red\n", "row 1"),
        ("pairs.csv", 'image1,image2,label,theme\na,b,Yes,"a fox\n', ""),
        ("pairs.csv", b"image1,image2,label,theme\na,b,Yes,caf\xe9\n", "UTF-8"),
        ("pairs.xlsx", "x", ".jsonl, .csv or .json"),
    ],
)
def test_problems_of_a_file(tmp_path, name, content, named):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = problem(file, tmp_path / "out")
    assert named in message and str(file) in message


def test_labels_that_are_all_alike_and_other_inputs_are_refused(folder, pairs, tmp_path):
    file = write_lines(folder / "pairs.jsonl", pairs)
    assert "alone" in problem(file, tmp_path / "out", editing=file)
    assert "--reasons" in problem(file, tmp_path / "out", server="http://127.0.0.1:9")
    (folder / "theme.txt").write_text("About {theme}?")
    assert "has no theme" in problem(file, tmp_path / "out", question=folder / "theme.txt")
    write_lines(file, [line | {"label": "Yes"} for line in pairs])
    assert "20 pairs 20 have a clear label" in problem(file, tmp_path / "out")


def test_copies_and_turned_photos_are_one_image(folder, tmp_path):
    image = Image.open(folder / "images" / "1a.png").resize((48, 32))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    image.save(folder / "side.png", exif=exif)
    image.rotate(-90, expand=True).save(folder / "upright.png")
    file = folder / "pairs.jsonl"
    write_lines(file, [row(0), row(1) | {"image1": "side.png", "image2": "upright.png"}])
    assert "row 2" in problem(file, tmp_path / "out")


def test_a_model_writes_the_reasons_that_are_missing(folder, pairs, tmp_path):
    """Those that contradict the label are left out; a user's own stay as they are."""

    def agrees(number, request):
        text = request["messages"][0]["content"][-1]["text"]
        verdict = "Yes" if "The verdict that was given is: Yes" in text else "No"
        return 200, {"choices": [{"message": {"content": f"{verdict}. Seen in both images."}}]}, {}

    file = write_lines(folder / "pairs.jsonl", pairs)
    with fake_judge.FakeJudge(agrees) as server:
        own(file, tmp_path / "out", test_share=0.0, server=server.url, reasons=True)
        assert len(server.requests) == sum(not line["reason"] for line in pairs)
    answers = Counter(
        line["messages"][1]["content"]
        for line in rows(tmp_path / "out", "consistency_reward_cot_train")
    )
    assert len(answers) == 4 and sum(answers.values()) == COUNT


@pytest.mark.slow
def test_own_pairs_are_trained_on(folder, pairs, judge_dir, tmp_path):
    """As docs/judge.md says: build, check, one step, and `accuracy` can read the test part."""
    output = tmp_path / "data"
    own(write_lines(folder / "pairs.jsonl", pairs), output)
    config = train_config(judge_dir, output, tmp_path / "judge", max_steps=1)
    config |= {"dataset": "consistency_reward_train", "first_token_weight": 0.1}
    check_data(config)
    run_processes(["-m", "paco_reward.cli", "train"], [config], tmp_path)
    assert any(
        np.abs(weights).max() > 0
        for name, weights in adapter(tmp_path / "judge").items()
        if "lora_B" in name
    )
    tested, labels = labeled_pairs(output, "consistency_reward_test")
    assert len(tested) == 4 and sorted(labels) == [False, False, True, True]
