"""build-dataset: reasons that people wrote, and splits that the metadata decides."""

import json
from pathlib import Path

import pytest
from pairing_tools import accepted, options, prompt_lines, rank_like_people, rows

from paco_reward.errors import PacoRewardError
from paco_reward.pairing.build import build


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write(file: Path, lines: list[dict]) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def ranked(world, tmp_path) -> Path:
    build(options(world, tmp_path / "out", sets_only=True))
    return rank_like_people(tmp_path / "out")


def reason_lines(ranked: Path, best: str = "Yes", worst: str = "No") -> list[dict]:
    """One reason for the best and the worst of every ranking; the candidate is shown first."""
    found = {}
    for line in lines_of(ranked):
        for name, word in ((line["rank_images"][0], best), (line["rank_images"][-1], worst)):
            key = (line["folder"], *sorted((name, line["ref_image"])))
            found[key] = {"folder": line["folder"], "images": [name, line["ref_image"]], "reason": f"{word}. I saw {name} first."}
    return list(found.values())


def test_written_reasons_become_the_answers_in_their_own_order(world, tmp_path, ranked):
    file = write(tmp_path / "reasons.jsonl", reason_lines(ranked))
    stats = build(options(world, tmp_path / "out", rankings=ranked, reasons_file=file))
    made = [row for part in ("train", "test") for row in rows(tmp_path / "out", f"consistency_reward_cot_{part}")]
    assert len(made) == sum(n["yes"] + n["no"] for n in stats["datasets"].values()) > 0
    for row in made:
        question, answer = (message["content"] for message in row["messages"])
        assert answer.startswith(("Yes. ", "No. ")) and question.startswith("<image><image>")
        assert row["images"][0].endswith(answer.split("I saw ")[1].removesuffix(" first."))
    assert accepted(tmp_path / "out", "consistency_reward_cot_train")


def test_reasons_against_their_label_and_missing_ones_are_left_out_and_counted(world, tmp_path, ranked):
    lines = reason_lines(ranked)
    lines[0]["reason"] = lines[0]["reason"].replace("Yes", "NO") if "Yes" in lines[0]["reason"] else "Yes, all is the same here."
    dropped = lines.pop()
    file = write(tmp_path / "reasons.jsonl", lines)
    counts = build(options(world, tmp_path / "out", rankings=ranked, reasons_file=file, duplicate_bits=0))["counts"]
    assert counts["reasons_missing"] == 1 and counts["reasons_contradicting"] == 1
    shown = json.dumps([rows(tmp_path / "out", f"consistency_reward_cot_{part}") for part in ("train", "test")])
    assert f"I saw {dropped['images'][0]} first" not in [
        text for row in json.loads(shown)[0] if row["images"][0].startswith(f"images/{dropped['folder']}/")
        for text in [row["messages"][1]["content"].split(". ", 1)[1]] if row["images"][1].endswith(dropped["images"][1])
    ]  # fmt: skip


def test_problems_of_a_reasons_file(world, tmp_path, ranked):
    good = reason_lines(ranked)

    def said(*lines: dict, **more) -> str:
        file = write(tmp_path / "reasons.jsonl", list(lines))
        with pytest.raises(PacoRewardError) as caught:
            build(options(world, tmp_path / "out", **{"rankings": ranked, "reasons_file": file} | more))
        return str(caught.value)

    assert "line 2" in said(good[0], {"folder": "p0"}) and "images (two names)" in said({"folder": "p0", "images": ["a"]})
    assert "idx of no prompt" in said({**good[0], "folder": "nowhere"})
    assert "'99/0.png' is not a sub-figure" in said({**good[0], "images": ["99/0.png", good[0]["images"][1]]})
    assert "has a reason before" in said(good[0], {**good[0], "images": good[0]["images"][::-1]})
    assert "run of their own" in said(good[0], editing=Path("edits.jsonl"))
    with pytest.raises(PacoRewardError, match=r"none\.jsonl cannot be read"):
        build(options(world, tmp_path / "out", rankings=ranked, reasons_file=tmp_path / "none.jsonl"))


def test_the_metadata_may_decide_the_split(world, tmp_path):
    lines = prompt_lines(world)
    decided = {line["idx"]: "test" if number % 2 else "train" for number, line in enumerate(lines)}
    file = write(tmp_path / "metadata.jsonl", [{**line, "split": decided[line["idx"]]} for line in lines])
    build(options(world, tmp_path / "out", metadata=file, sets_only=True))
    people = rank_like_people(tmp_path / "out")
    build(options(world, tmp_path / "out", metadata=file, rankings=people, test_share=0.9))
    for part in ("train", "test"):
        shown = {image.split("/")[1] for row in rows(tmp_path / "out", f"consistency_reward_{part}") for image in row["images"]}
        assert shown and {decided[folder] for folder in shown} == {part}


def test_a_theme_is_on_one_side_only(world, tmp_path):
    lines = prompt_lines(world)
    for changed, message in (
        ([{**lines[0], "split": "train"}, {**lines[0], "split": "test"}], "another split before"),
        ([{**lines[0], "split": "train"}, {**lines[1], "theme": lines[0]["prompt"], "split": "test"}], "shares its theme"),
        ([{**lines[0], "split": "dev"}], "train or test, not 'dev'"),
    ):
        file = write(tmp_path / "metadata.jsonl", changed)
        with pytest.raises(PacoRewardError, match=message):
            build(options(world, tmp_path / "out", metadata=file, sets_only=True))
