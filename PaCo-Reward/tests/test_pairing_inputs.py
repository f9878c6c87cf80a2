"""build-dataset: problems are reported before anything is cut or asked; unusual valid inputs."""

import json
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
        (1, {"idx": "p0"}, "idx p0"),
        (0, {"image": "nowhere.png"}, "nowhere.png"),
        (2, {"file": ["p2/0.png", "p1/2.png"]}, "p1/2.png"),
        (0, {"prompt": "a 1x2 grid of a cat"}, "1x2"),
        (0, {"prompt": "a 1x2 grid of <image>. [LEFT]: a. [RIGHT]: b."}, "<image>"),
    ],
)
def test_problems_of_a_metadata_line(world, tmp_path, lines, number, change, named):
    """The message names the row."""
    lines[number] |= change
    file = write_lines(tmp_path / "lines.jsonl", lines)
    message = problem(world, tmp_path / "out", metadata=file, sets_only=True)
    assert named in message and f"{file} row {number + 1}" in message
    assert not (tmp_path / "out").exists()


def test_several_unusable_rows_are_named_at_once(world, tmp_path, lines):
    """Of edits and of rankings."""
    images = {"source": lines[0]["idx"], "edited": "b.png"}
    edits = [images | {"instruction": text} for text in ("x", "<image>", "", "y <audio>")]
    ranking = {"folder": "p0", "ref_image": "00/0.png", "rank_images": ["00/1.png", "x.png"]}
    rankings = [ranking, ranking | {"folder": "none"}]
    files = {}
    for name, content in (("editing", edits), ("rankings", rankings)):
        files[name] = write_lines(tmp_path / f"{name}.jsonl", content)
    message = problem(None, tmp_path / "out", editing=files["editing"])
    assert [line.split()[2] for line in message.splitlines()] == ["2:", "3:", "4:"]
    message = problem(None, tmp_path / "out", editing=write_lines(files["editing"], edits[:1] * 30))
    assert len(message.splitlines()) == 21 and message.endswith("10 more rows cannot be used")
    message = problem(world, tmp_path / "out", rankings=files["rankings"])
    assert "x.png" in message.splitlines()[0] and "none" in message.splitlines()[1]


@pytest.mark.parametrize("option", ["question", "image_labels"])
def test_what_is_asked_cannot_hold_an_images_place(world, tmp_path, option):
    (tmp_path / "mine.txt").write_text("Same {theme} in <image>?")
    value = {"question": tmp_path / "mine.txt", "image_labels": "<image>: "}[option]
    assert "<image>" in problem(world, tmp_path / "out", sets_only=True, **{option: value})


def test_a_downloaded_data_set_is_not_written_over(world, tmp_path):
    (tmp_path / "dataset_info.json").write_text('{"theirs": {}}')
    with pytest.raises(UserError, match=str(tmp_path)):
        build(world, tmp_path, sets_only=True)


def test_generations_on_several_lines(world, tmp_path, lines):
    """As PaCo-GRPO's evaluation writes them: one file a line. Or in a JSON list."""
    first = lines[0] | {"idx": 7, "note": "a line\u2028separator"}  # not a line break in jsonl
    generations = [first | {"image": None, "file": f"p0/{g}.png", "seed": g} for g in range(3)]
    file = write_lines(tmp_path / "lines.jsonl", generations)
    (item,) = read_prompts(file, world / "grids")
    assert item.folder == "7"
    assert [names[2] for names in item.generations] == ["00/2.png", "01/2.png", "02/2.png"]
    file.write_text(json.dumps(generations, indent=1))
    assert read_prompts(file, world / "grids") == [item]


def test_people_rank_sets_and_the_metadata_may_state_the_split(world, tmp_path, lines):
    for line in lines:
        line["split"] = "test" if line["idx"] in ("p2", "p5") else "train"
    file = write_lines(tmp_path / "metadata.jsonl", lines)
    options = {"metadata": file, "candidates": 3, "sets_per_prompt": 5, "no_ranks": 2}
    assert build(world, tmp_path / "out", **options, sets_only=True)["counts"]["sets"] == 30
    people = rank_like_people(tmp_path / "out")
    build(world, tmp_path / "out", **options, rankings=people, test_share=0.9)
    decided = {line["idx"]: line["split"] for line in lines}
    for part in ("train", "test"):
        learned = rows(tmp_path / "out", f"consistency_reward_{part}")
        assert learned
        for row in learned:
            (_, idx, first, _), (*_, second, _) = (Path(image).parts for image in row["images"])
            assert decided[idx] == part
            assert row["messages"][1]["content"] == ("Yes" if first == second else "No")


def test_written_reasons_become_the_answers_in_their_image_order(world, tmp_path):
    """Not those that contradict their label, say nothing else, or are not written yet."""
    build(world, tmp_path / "out", sets_only=True)
    options = {"rankings": rank_like_people(tmp_path / "out"), "duplicate_bits": 0}
    build(world, tmp_path / "out", test_share=0.0, **options)
    lines = []
    for row in rows(tmp_path / "out", "consistency_reward_train"):
        first, second = ("/".join(Path(image).parts[2:]) for image in row["images"])
        reason = f"{row['messages'][1]['content']}. I saw {second} first."
        folder = Path(row["images"][0]).parts[1]
        lines.append({"folder": folder, "images": [second, first], "reason": reason})
    lines[0]["reason"] = ""
    contradicts = {"Y": "NO, they differ in all ways.", "N": "Yes, all is the same here."}
    lines[1]["reason"] = contradicts[lines[1]["reason"][0]]
    lines[2]["reason"] = lines[2]["reason"].partition(" ")[0]
    options["reasons_file"] = write_lines(tmp_path / "reasons.jsonl", lines)
    counts = build(world, tmp_path / "out", **options)["counts"]
    for fate in ("missing", "contradicting", "unreadable"):
        assert counts[f"reasons_{fate}"] == 1
    for part in ("train", "test"):
        for row in rows(tmp_path / "out", f"consistency_reward_cot_{part}"):
            answer = row["messages"][1]["content"]
            assert answer.startswith(("Yes. ", "No. "))
            assert row["images"][0].endswith(answer.split("I saw ")[1].removesuffix(" first."))
