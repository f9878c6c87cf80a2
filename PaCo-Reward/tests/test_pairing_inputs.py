"""build-dataset: problems are reported before anything is cut or asked; unusual valid inputs."""

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
    ],
)
def test_problems_of_a_metadata_line(world, tmp_path, lines, number, change, named):
    lines[number] |= change
    file = write_lines(tmp_path / "lines.jsonl", lines)
    message = problem(world, tmp_path / "out", metadata=file, sets_only=True)
    assert named in message and f"{file} row {number + 1}" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change",
    [{"folder": "p77"}, {"rank_images": ["00/1.png", "09/1.png"]}],
)
def test_problems_of_a_ranking(world, tmp_path, change):
    row = {"folder": "p0", "ref_image": "00/0.png", "rank_images": ["00/1.png", "01/1.png"]}
    file = write_lines(tmp_path / "bad.jsonl", [row | change])
    assert "bad.jsonl row 1" in problem(world, tmp_path / "out", rankings=file)


def test_a_downloaded_data_set_is_not_written_over(world, tmp_path):
    (tmp_path / "dataset_info.json").write_text('{"theirs": {}}')
    with pytest.raises(UserError, match=str(tmp_path)):
        build(world, tmp_path, sets_only=True)


def test_generations_on_several_lines(world, tmp_path, lines):
    """As PaCo-GRPO's evaluation writes them: one file a line."""
    first = lines[0] | {"idx": 7, "note": "a line\u2028separator"}  # not a line break in jsonl
    generations = [first | {"image": None, "file": f"p0/{g}.png", "seed": g} for g in range(3)]
    file = write_lines(tmp_path / "lines.jsonl", generations)
    (item,) = read_prompts(file, world / "grids")
    assert item.folder == "7"
    assert [names[2] for names in item.generations] == ["00/2.png", "01/2.png", "02/2.png"]


def test_the_metadata_may_state_the_split(world, tmp_path, lines):
    for line in lines:
        line["split"] = "test" if line["idx"] in ("p2", "p5") else "train"
    file = write_lines(tmp_path / "metadata.jsonl", lines)
    build(world, tmp_path / "out", metadata=file, sets_only=True)
    people = rank_like_people(tmp_path / "out")
    build(world, tmp_path / "out", metadata=file, rankings=people, test_share=0.9)
    decided = {line["idx"]: line["split"] for line in lines}
    for part in ("train", "test"):
        learned = rows(tmp_path / "out", f"consistency_reward_{part}")
        assert learned
        for row in learned:
            assert decided[row["images"][0].split("/")[1]] == part


def reason_lines(ranked: Path) -> list[dict]:
    """One reason for the best and the worst of every ranking, with the candidate first."""
    reasons = {}
    for line in read_lines(ranked):
        best, *_, worst = line["rank_images"]
        for name, word in ((best, "Yes"), (worst, "No")):
            reason = {"images": [name, line["ref_image"]], "reason": f"{word}. I saw {name} first."}
            reasons[line["folder"], *sorted(reason["images"])] = reason | {"folder": line["folder"]}
    return list(reasons.values())


def test_written_reasons_become_the_answers_in_their_image_order(world, tmp_path):
    """Not those that contradict their label, or are not written yet."""
    build(world, tmp_path / "out", sets_only=True)
    ranked = rank_like_people(tmp_path / "out")
    unwritten, *lines = reason_lines(ranked)
    lines.append(unwritten | {"reason": ""})
    contradicts = {"Y": "NO, they differ in all ways.", "N": "Yes, all is the same here."}
    lines[0]["reason"] = contradicts[lines[0]["reason"][0]]
    file = write_lines(tmp_path / "reasons.jsonl", lines)
    options = {"rankings": ranked, "reasons_file": file, "duplicate_bits": 0}
    counts = build(world, tmp_path / "out", **options)["counts"]
    assert counts["reasons_missing"] == 1 and counts["reasons_contradicting"] == 1
    for part in ("train", "test"):
        for row in rows(tmp_path / "out", f"consistency_reward_cot_{part}"):
            answer = row["messages"][1]["content"]
            assert answer.startswith(("Yes. ", "No. "))
            assert row["images"][0].endswith(answer.split("I saw ")[1].removesuffix(" first."))
