"""build-dataset: problems are reported before anything is cut or asked; unusual valid inputs."""

import shutil
from pathlib import Path

import pytest
from pairing_tools import build, rank_like_people, read_lines, rows, write_lines

from paco_judge.errors import UserError
from paco_reward.pairing.inputs import read_prompts


@pytest.fixture
def lines(world) -> list[dict]:
    return read_lines(world / "metadata.jsonl")


def problem(*arguments, **options) -> str:
    with pytest.raises((UserError, OSError)) as caught:
        build(*arguments, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("number", "change", "named"),
    [
        (2, "{broken", "line 2"),
        (2, {"idx": "p0"}, "idx p0"),
        (1, {"idx": "../up"}, "idx"),
        (1, {"image": "nowhere.png"}, "nowhere.png"),
        (1, {"prompt": "an <image> of a cat"}, "<image>"),
    ],
)
def test_problems_of_a_metadata_line(world, tmp_path, lines, number, change, named):
    if isinstance(change, dict):
        change = lines[number - 1] | change
    file = write_lines(tmp_path / "lines.jsonl", [*lines[: number - 1], change])
    message = problem(world, tmp_path / "out", metadata=file, sets_only=True)
    assert named in message and str(file) in message
    assert not (tmp_path / "out" / "images").exists()


@pytest.mark.parametrize(
    "change",
    [{"folder": "p77"}, {"rank_images": ["00/1.png", "09/1.png"]}, {"rank_images": ["00/1.png"]}],
)
def test_problems_of_a_ranking(world, tmp_path, change):
    row = {
        "folder": "p0",
        "ref_image": "00/0.png",
        "rank_images": ["00/1.png", "01/1.png"],
    } | change
    file = write_lines(tmp_path / "bad.jsonl", [row])
    assert "bad.jsonl row 1" in problem(world, tmp_path / "out", rankings=file)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, "--rankings"),
        ({"metadata": "/no/file", "sets_only": True}, "/no/file"),
        ({"sets_only": True, "reasons": True}, "--server"),
        ({"sets_only": True, "yes_ranks": 3, "no_ranks": 2}, "--candidates"),
        ({"server": "http://127.0.0.1:9"}, "http://127.0.0.1:9"),
    ],
)
def test_problems_of_options(world, tmp_path, change, named):
    assert named in problem(world, tmp_path / "out", **change)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("min_gap", "nan"),
        ("min_gap", -0.1),
        ("test_share", 1),
        ("duplicate_bits", 65),
        ("name", "../x"),
        ("name", "x_cot"),
    ],
)
def test_values_out_of_range_are_refused(world, tmp_path, capsys, option, value):
    with pytest.raises(SystemExit):
        build(world, tmp_path / "out", sets_only=True, **{option: value})
    assert f"--{option}" in capsys.readouterr().err


def test_a_copy_of_the_images_continues_and_other_images_are_refused(world, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(world, copy, copy_function=shutil.copyfile)  # with other times
    build(world, tmp_path / "out", sets_only=True)
    build(copy, tmp_path / "out", sets_only=True)
    first, second, *_ = sorted((copy / "grids").iterdir())
    shutil.copyfile(second, first)
    assert "images/" in problem(copy, tmp_path / "out", sets_only=True)


@pytest.mark.parametrize(
    ("idx", "files"),
    [
        (("fox", "fox-red"), ["fox.png", "fox_2.png", "fox-red.png", "fox-red_2.png"]),
        (("p1", "p1_b"), ["p1_1.png", "p1_2.png", "p1_b_1.png", "p1_b_2.png"]),
        (("a", "a_1-x"), ["a_0.png", "a_1.png", "a_1-x.png"]),
        (("cat", "cat-2"), ["cat.png", "cat-2.png"]),  # the second generation, or the second cat
    ],
)
def test_a_name_that_fits_two_prompts_is_refused(world, tmp_path, lines, idx, files):
    (tmp_path / "grids").mkdir()
    for number, file in enumerate(files):
        shutil.copyfile(
            world / "grids" / f"p{number % 2}_{number % 3}.png", tmp_path / "grids" / file
        )
    rows = [lines[number] | {"idx": name} for number, name in enumerate(idx)]
    file = write_lines(tmp_path / "lines.jsonl", rows)
    sources = {"grids": tmp_path / "grids", "metadata": file}
    message = problem(None, tmp_path / "out", **sources, sets_only=True)
    assert all(name in message for name in idx) and ".png" in message
    # In folders of their own they are clear; one folder leaves the other prompt's names unclear.
    for name in reversed(idx):
        assert ".png" in problem(None, tmp_path / "out", **sources, sets_only=True)
        (tmp_path / "grids" / name).mkdir()
        shutil.copyfile(tmp_path / "grids" / files[0], tmp_path / "grids" / name / "1.png")
        shutil.copyfile(tmp_path / "grids" / files[1], tmp_path / "grids" / name / "2.png")
    for item, name in zip(read_prompts(file, tmp_path / "grids", True), idx, strict=True):
        assert {source.parent.name for source, _ in item.sources.values()} == {name}


@pytest.mark.parametrize("column", ["image", "file", "images"])
def test_an_image_that_two_lines_name_is_refused(world, tmp_path, lines, column):
    named = [["p0_0.png", "p0_1.png"], ["p1_0.png", "p0_1.png"]]
    rows = [line | {column: files} for line, files in zip(lines[:2], named, strict=True)]
    file = write_lines(tmp_path / "lines.jsonl", rows)
    message = problem(world, tmp_path / "out", metadata=file, sets_only=True)
    assert "p0_1.png" in message and "row 1" in message and "row 2" in message


def test_a_downloaded_data_set_is_not_written_over(world, tmp_path):
    (tmp_path / "out").mkdir()
    index = tmp_path / "out" / "dataset_info.json"
    index.write_text('{"theirs": {}}')
    assert "was not built here" in problem(world, tmp_path / "out", sets_only=True)
    assert index.read_text() == '{"theirs": {}}'


def test_sets_of_nothing_are_an_error(world, tmp_path, lines):
    one = write_lines(tmp_path / "one.jsonl", [lines[0] | {"image": "p0_0.png"}])
    assert "no sets are left (prompts 1" in problem(
        world, tmp_path / "out", metadata=one, sets_only=True
    )


def test_generations_on_several_lines(world, tmp_path, lines):
    """As PaCo-GRPO's evaluation writes them: one file a line."""
    first = lines[0] | {"idx": 7, "note": "a line\u2028separator"}  # not a line break in jsonl
    generations = [first | {"image": None, "file": f"p0_{g}.png", "seed": g} for g in range(3)]
    file = write_lines(tmp_path / "lines.jsonl", generations)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    (item,) = read_prompts(file, world / "grids", True)
    assert (
        item.folder == "7" and len(item.generations) == 3 and item.generations[2][2] == "02/2.png"
    )


def test_the_metadata_may_state_the_split(world, tmp_path, lines):
    decided = {line["idx"]: "train" for line in lines} | {"p2": "test", "p5": "test"}
    file = write_lines(
        tmp_path / "metadata.jsonl", [{**line, "split": decided[line["idx"]]} for line in lines]
    )
    build(world, tmp_path / "out", metadata=file, sets_only=True)
    people = rank_like_people(tmp_path / "out")
    build(world, tmp_path / "out", metadata=file, rankings=people, test_share=0.9)
    for part in ("train", "test"):
        made = rows(tmp_path / "out", f"consistency_reward_{part}")
        shown = {image.split("/")[1] for row in made for image in row["images"]}
        assert shown and {decided[folder] for folder in shown} == {part}


def reason_lines(ranked: Path) -> list[dict]:
    """One reason for the best and the worst of every ranking, with the candidate first."""
    found = {}
    for line in read_lines(ranked):
        for name, word in ((line["rank_images"][0], "Yes"), (line["rank_images"][-1], "No")):
            key = (line["folder"], *sorted((name, line["ref_image"])))
            images = [name, line["ref_image"]]
            found[key] = {
                "folder": line["folder"],
                "images": images,
                "reason": f"{word}. I saw {name} first.",
            }
    return list(found.values())


def test_written_reasons_become_the_answers_in_their_image_order(world, tmp_path):
    build(world, tmp_path / "out", sets_only=True)
    ranked = rank_like_people(tmp_path / "out")
    lines = reason_lines(ranked)
    word = lines[0]["reason"].split(".")[0]
    lines[0]["reason"] = (
        "NO, they differ in all ways." if word == "Yes" else "Yes, all is the same here."
    )
    dropped = lines.pop()
    file = write_lines(tmp_path / "reasons.jsonl", lines)
    counts = build(world, tmp_path / "out", rankings=ranked, reasons_file=file, duplicate_bits=0)[
        "counts"
    ]
    assert counts["reasons_missing"] == 1 and counts["reasons_contradicting"] == 1
    made = [
        row
        for part in ("train", "test")
        for row in rows(tmp_path / "out", f"consistency_reward_cot_{part}")
    ]
    left_out = {f"images/{dropped['folder']}/{name}" for name in dropped["images"]}
    assert left_out not in [set(row["images"]) for row in made]
    for row in made:
        question, answer = (message["content"] for message in row["messages"])
        assert answer.startswith(("Yes. ", "No. ")) and question.startswith("<image><image>")
        assert row["images"][0].endswith(answer.split("I saw ")[1].removesuffix(" first."))
