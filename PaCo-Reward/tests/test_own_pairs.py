"""build-dataset --pairs: a user's labeled pairs."""

import csv
import io
import re
import shutil
from pathlib import Path

import pytest
from fakes import fake_judge
from pairing_tools import build, judge_model, noise, write_lines

from paco_judge.errors import UserError
from paco_judge.questions import load_question, theme_question
from paco_reward.datasets import load_examples

COUNT = 20
TRAIN = "consistency_reward_train"


def own(file: Path, output: Path, **options: object) -> dict:
    return build(None, output, pairs=file, sets_per_prompt=None, **options)


def problem(file: Path, output: Path, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        own(file, output, **options)
    assert not output.exists()
    return str(caught.value)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """0a.png, 0b.png, 1a.png, …"""
    folder = tmp_path_factory.mktemp("images")
    for number in range(COUNT):
        noise(1, number).save(folder / f"{number}a.png")
        noise(2, number).save(folder / f"{number}b.png")
    return folder


@pytest.fixture
def pairs(images) -> list[dict]:
    """Rows with and without themes and reasons, Yes and No in turn."""
    lines = []
    for number in range(COUNT):
        lines.append(
            {
                "image1": str(images / f"{number}a.png"),
                "image2": str(images / f"{number}b.png"),
                "label": ("Yes", "No")[number % 2],
                "theme": "" if number % 3 == 0 else f'a "red" fox, {number}',
                "reason": "" if number % 4 < 2 else f"both show {number}.",
            }
        )
    return lines


def write_csv(file: Path, lines: list[dict]) -> Path:
    """With a byte order mark, names of columns in capitals, empty cells, and spaces after commas."""
    table = io.StringIO()
    writer = csv.writer(table, quoting=csv.QUOTE_ALL)
    writer.writerow(name.capitalize() for name in lines[0])
    writer.writerows(line.values() for line in lines)
    file.write_text(table.getvalue().replace('","', '", "'), encoding="utf-8-sig")
    return file


@pytest.mark.parametrize("write", [write_lines, write_csv])
def test_each_pair_is_learned_as_the_reward_asks_it(pairs, tmp_path, caplog, write):
    """A column that is not used, such as a misspelt one, is named."""
    lines = [line | {"themes": "a cat"} for line in pairs]
    suffix = "csv" if write is write_csv else "jsonl"
    own(write(tmp_path / f"pairs.{suffix}", lines), tmp_path / "out", test_share=0.0)
    (warning,) = caplog.messages
    assert warning.endswith(": themes")
    expected = {}
    for number, line in enumerate(pairs):
        question = theme_question(line["theme"]) if line["theme"] else load_question("pair").text()
        reason = f". Both show {number}." if line["reason"] else ""
        contents = (Path(line["image1"]).read_bytes(), Path(line["image2"]).read_bytes())
        expected[contents] = (f"<image><image>{question}", f"{line['label']}{reason}")
    found = {}
    for example in load_examples(tmp_path / "out", TRAIN):
        contents = tuple(image.read_bytes() for image in example.images)
        found[contents] = (example.prompt, example.answer)
    assert found == expected


def test_a_model_writes_the_reasons_that_are_missing(pairs, tmp_path):
    """A user's own stay."""
    file = write_lines(tmp_path / "pairs.jsonl", pairs)
    output = tmp_path / "out"
    with fake_judge.FakeJudge(judge_model) as server:
        own(file, output, test_share=0.0, server=server.url, reasons=True)
        assert len(server.requests) == sum(not line["reason"] for line in pairs)
    answers = [example.answer for example in load_examples(output, "consistency_reward_cot_train")]
    for verdict in ("Yes", "No"):
        written = [answer for answer in answers if answer.startswith(f"{verdict}. The shape")]
        assert len(written) == COUNT / 4
    assert len(set(answers)) == COUNT


@pytest.mark.parametrize("question", [None, "mine.txt"])
def test_both_orders_with_both_labels_are_dropped_unless_the_question_is_a_users(
    pairs, tmp_path, question
):
    if question:
        question = tmp_path / question
        question.write_text("Is the first one nicer?")
    last = pairs[-1]
    turned = {"image1": last["image2"], "image2": last["image1"], "label": "Yes", "reason": ""}
    file = write_lines(tmp_path / "pairs.jsonl", [*pairs, last | turned])
    counts = own(file, tmp_path / "out", test_share=0.0, question=question)["counts"]
    assert counts.get("repeated_disputed") == (None if question else 2)


LABELS = {
    "label": [("Yes", "Yes"), ("no", "No"), (True, "Yes"), (0, "No"), ("FALSE", "No")]
    + [("1.0", "Yes"), (1.0, "Yes"), ("Yes ", "Yes"), ("\xa0no", "No"), ("0.0", "No"), (0.0, "No")],
    "score": [(1, "Yes"), (0.55, "Yes"), (0.54, None), (0.5, None), ("0.46", None), ("0.45", "No")],
}


def test_labels_and_scores(pairs, tmp_path):
    """Scores that differ by less than 0.05 from 1/2 are no labels."""
    expected = {}
    lines = []
    for column, values in LABELS.items():
        for value, answer in values:
            line = pairs[len(lines)] | {"label": None, "reason": None, column: value}
            expected[Path(line["image1"]).read_bytes()] = answer
            lines.append(line)
    file = write_lines(tmp_path / "pairs.jsonl", lines)
    stats = own(file, tmp_path / "out", test_share=0.0)
    assert stats["counts"]["unclear"] == 3
    for example in load_examples(tmp_path / "out", TRAIN):
        answer = expected.pop(example.images[0].read_bytes(), example.answer)
        assert example.answer == answer
    assert list(expected.values()) == [None] * 3


@pytest.mark.parametrize(("connected", "tested"), [(COUNT, None), (12, 2), (1, 2)])
def test_a_large_group_of_connected_images_does_not_become_the_test_set(
    pairs, tmp_path, caplog, connected, tested
):
    """If there is nothing else, there is no test set, and a line says so, as of a small one."""
    for line in pairs[1:connected]:
        line["image1"] = pairs[0]["image1"]
    file = write_lines(tmp_path / "pairs.jsonl", pairs)
    for seed in range(4):
        stats = own(file, tmp_path / str(seed), seed=seed, test_share=0.1)
        testing = stats["datasets"].get("consistency_reward_test", {})
        assert testing.get("pairs") == tested
    assert ("no pairs for testing" in caplog.text) == (tested is None)
    assert ("only 2 of 20 pairs are for testing" in caplog.text) >= (connected == 1)
    assert ("--test_share (0.1)" in caplog.text) == (tested is not None)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"image2": "none.png"}, "none.png"),
        ({"image2": "copy.png"}, "image2"),
        ({"label": "maybe"}, "label"),
        ({"score": 0.3}, "score"),
        ({"reason": "yes: both show it."}, "reason"),
        ({"label": "Yes", "reason": "No they differ."}, "reason"),
        ({"theme": "a <image> of a fox"}, "<image>"),
        ({"reason": "both show <|video_pad|> it."}, "<|video_pad|>"),
    ],
)
def test_problems_of_a_row(pairs, tmp_path, change, named):
    """The message names all rows; nothing is written."""
    shutil.copy(pairs[1]["image1"], tmp_path / "copy.png")
    pairs[1] |= change
    pairs[5]["label"] = "?"
    message = problem(write_lines(tmp_path / "pairs.jsonl", pairs), tmp_path / "out")
    first, second = message.splitlines()
    assert "pairs.jsonl row 2: " in first and named in first
    assert "pairs.jsonl row 6: " in second and "label" in second
    table = write_csv(tmp_path / "pairs.csv", pairs)
    text = table.read_text(encoding="utf-8-sig")
    table.write_text(text.replace('""red""', '"red"'))
    assert re.search(r"pairs.csv line \d is not CSV", problem(table, tmp_path / "out"))
    table.write_text(text.replace("fox", "füchse"), encoding="cp1252")
    assert "pairs.csv is not a text in UTF-8" in problem(table, tmp_path / "out")


def test_training_on_images_that_an_earlier_call_keeps_for_testing(pairs, tmp_path, caplog):
    """By labels of mistakes, of which none is left out, and with no share for testing."""
    file = write_lines(tmp_path / "pairs.jsonl", pairs)
    output = tmp_path / "out"
    own(file, output, test_share=0.3)
    tested = load_examples(output, "consistency_reward_test")
    assert "for testing in" not in caplog.text
    warning = f"0 themes and {2 * len(tested)} images of the training pairs are for testing"
    trained = load_examples(output, TRAIN)[0]
    across = {"image1": str(trained.images[0]), "image2": str(tested[0].images[1]), "label": "No"}
    labels = write_lines(tmp_path / "labels.jsonl", [*pairs, across])
    for share in (None, 0.1):  # what was trained on stays
        options = {"beside": TRAIN, "test_share": share, "sets_per_prompt": None}
        counts = build(None, output, mend=labels, **options)["counts"]
        assert counts["labels_for_training"] == COUNT + 1
    assert warning in caplog.text
    caplog.clear()
    own(file, output, name="all", test_share=0.0)
    assert warning in caplog.text
