"""build-dataset --pairs: a user's labeled pairs, from the file to a training step."""

import csv
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fakes import fake_judge
from pairing_tools import all_bytes, build, write_lines
from PIL import ExifTags, Image
from training_tools import adapter, run_processes, train_config

from paco_judge.errors import UserError
from paco_judge.questions import load_question, theme_question
from paco_reward.datasets import check_data, labeled_pairs, load_examples

COUNT = 20
PREFIX = "<image><image>"


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
        theme = "" if number % 3 == 0 else f'a "red" fox, {number}'
        reason = "" if number % 4 < 2 else f"both show {number}."
        lines.append(row(number, theme=theme, reason=reason))
    return lines


def test_json_lines_json_and_csv_make_the_same_data_set(folder, pairs, tmp_path):
    """Also with a byte order mark, and names of columns in capitals."""
    write_lines(folder / "pairs.jsonl", pairs)
    (folder / "pairs.json").write_text("\ufeff" + json.dumps(pairs))
    with (folder / "pairs.csv").open("w", encoding="utf-8-sig", newline="") as file:
        table = csv.writer(file)
        table.writerow(name.capitalize() for name in pairs[0])
        table.writerows(line.values() for line in pairs)
    built = {}
    for suffix in ("jsonl", "json", "csv"):
        stats = own(folder / f"pairs.{suffix}", tmp_path / suffix)
        built[suffix] = all_bytes(tmp_path / suffix)
    assert built["jsonl"] == built["json"] == built["csv"]
    assert stats["counts"] == {"pairs": COUNT}
    assert stats["datasets"]["consistency_reward_train"]["yes"] == 6
    assert stats["datasets"]["consistency_reward_test"]["no"] == 4


def test_each_pair_is_learned_as_the_reward_asks_it(folder, pairs, tmp_path):
    own(write_lines(folder / "pairs.jsonl", pairs), tmp_path / "out", test_share=0.0)
    expected = {}
    for number, line in enumerate(pairs):
        question = theme_question(line["theme"]) if line["theme"] else load_question("pair").text()
        reason = f". Both show {number}." if line["reason"] else ""
        contents = [(folder / line[name]).read_bytes() for name in ("image1", "image2")]
        expected[tuple(contents)] = (PREFIX + question, f"{line['label']}{reason}")
    found = {}
    for example in load_examples(tmp_path / "out", "consistency_reward_train"):
        contents = tuple(image.read_bytes() for image in example.images)
        found[contents] = (example.prompt, example.answer)
    assert found == expected
    (folder / "mine.txt").write_text("Same fox?")
    stats = own(folder / "pairs.jsonl", tmp_path / "mine", question=folder / "mine.txt")
    examples = load_examples(tmp_path / "mine", "consistency_reward_train")
    assert {example.prompt for example in examples} == {f"{PREFIX}Same fox?"}
    assert [asked["template"] for asked in stats["asked"]["questions"]] == ["Same fox?"]


def answers(output: Path) -> dict[bytes, str]:
    """The answer about each first image, by its content."""
    examples = load_examples(output, "consistency_reward_train")
    return {example.images[0].read_bytes(): example.answer for example in examples}


def test_labels_and_scores(folder, tmp_path):
    labels = ["Yes", "no", True, 0, "FALSE", 1.0, "true", False]
    lines = [row(number, label) for number, label in enumerate(labels)]
    scores = [1, 0.9, 0.55, 0.54, 0.5, "0.46", "0.45", 0.1, 0]
    for number, score in enumerate(scores, start=len(lines)):
        lines.append(row(number, score=score) | {"label": None})
    file = write_lines(folder / "pairs.jsonl", lines)
    stats = own(file, tmp_path / "out", test_share=0.0)
    assert stats["counts"] == {"pairs": 17, "unclear": 3}
    expected = ["Yes", "No", "Yes", "No", "No", "Yes", "Yes", "No"]
    expected += ["Yes", "Yes", "Yes", None, None, None, "No", "No", "No"]
    found = answers(tmp_path / "out")
    for number, answer in enumerate(expected):
        image = (folder / "images" / f"{number}a.png").read_bytes()
        assert found.get(image) == answer, number
    assert "unclear" not in own(file, tmp_path / "all", test_share=0.0, min_gap=0)["counts"]


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
        ({"image2": "side.png"}, "the same image"),
        ({"image2": "pairs.jsonl"}, "PNG"),
        ({"label": "maybe"}, "label .*'maybe'"),
        ({"label": ""}, "a label or a score"),
        ({"score": 0.3}, "a label or a score"),
        ({"label": None, "score": 4}, "score"),
        ({"label": None, "score": float("nan")}, "score"),
        ({"theme": "an <image> of a cat"}, "theme .*<image>"),
        ({"reason": "yes: both show it."}, "reason"),
    ],
)
def test_problems_of_a_row(folder, pairs, tmp_path, change, named):
    """The message names the row, and how many others; nothing is written."""
    image = Image.open(folder / "images" / "1a.png")
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # a photo on its side is one with its upright copy
    image.rotate(90, expand=True).save(folder / "side.png", exif=exif)
    pairs[1] |= change
    pairs[5]["label"] = "?"
    message = problem(write_lines(folder / "pairs.jsonl", pairs), tmp_path / "out")
    assert "pairs.jsonl row 2: " in message and "1 more rows" in message
    assert re.search(named, message)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("pairs.jsonl", "", "pairs.jsonl"),
        ("pairs.json", "{}", "pairs.json"),
        ("pairs.jsonl", "{x", "line 1"),
        ("pairs.csv", "image1;image2;label\na.png;b.png;Yes\n", "image1;image2;label"),
        ("pairs.csv", "image1,image2,label,theme\na,b,Yes,a fox, red\n", "row 1"),
        ("pairs.csv", 'image1,image2,label,theme\na,b,Yes,"a fox\n', "pairs.csv"),
        ("pairs.csv", b"image1,image2,label,theme\na,b,Yes,caf\xe9\n", "UTF-8"),
        ("pairs.xlsx", "x", ".csv"),
    ],
)
def test_problems_of_a_file(tmp_path, name, content, named):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert named in problem(file, tmp_path / "out")


def test_labels_that_are_all_alike_and_other_inputs_are_refused(folder, pairs, tmp_path):
    file = write_lines(folder / "pairs.jsonl", pairs)
    assert "--editing" in problem(file, tmp_path / "out", editing=file)
    assert "--reasons" in problem(file, tmp_path / "out", server="http://127.0.0.1:9")
    (folder / "theme.txt").write_text("About {theme}?")
    assert "theme.txt" in problem(file, tmp_path / "out", question=folder / "theme.txt")
    write_lines(file, [line | {"label": "Yes"} for line in pairs])
    assert "20 pairs" in problem(file, tmp_path / "out")


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
    examples = load_examples(tmp_path / "out", "consistency_reward_cot_train")
    learned = Counter(example.answer for example in examples)
    assert learned["Yes. Seen in both images."] == learned["No. Seen in both images."] == COUNT / 4
    assert len(learned) == 2 + COUNT / 2


@pytest.mark.slow
def test_own_pairs_are_trained_on(folder, pairs, judge_dir, tmp_path):
    """As docs/judge.md says: build, check, one step, and `accuracy` can read the test part."""
    output = tmp_path / "data"
    own(write_lines(folder / "pairs.jsonl", pairs), output)
    config = train_config(judge_dir, output, tmp_path / "judge", max_steps=1)
    config |= {"dataset": "consistency_reward_train", "first_token_weight": 0.1}
    check_data(config)
    run_processes(["-m", "paco_reward.cli", "train"], [config], tmp_path)
    weights = adapter(tmp_path / "judge")
    assert any(np.abs(value).max() > 0 for name, value in weights.items() if "lora_B" in name)
    tested, labels = labeled_pairs(output, "consistency_reward_test")
    assert len(tested) == len(labels) == 2 * labels.count(True) == 8
