"""The judge's toy pairs: drawn, paired by `paco-reward build-dataset`, ranked and explained from the recorded contents."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paco_toy import build_world
from paco_toy.build_world import TESTS, TRAIN
from paco_toy.oracle import read_prompt
from paco_toy.world import CHARACTERS, HELD_OUT, KNOWN, Character

FLUX = Path(__file__).resolve().parents[1] / "models" / "flux"
PROMPTS = {"train": 40, "test": 10}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("world")
    build_world.draw(out, seed=3, prompts=PROMPTS)
    build = [
        Path(sys.executable).with_name("paco-reward"),
        "build-dataset",
        "--grids",
        out / "grids",
    ]
    build += ["--metadata", out / "metadata.jsonl", "--output", out / "data", "--name", "toy_pairs"]
    subprocess.run([*build, "--sets_only"], check=True)
    ranked, sets = build_world.annotate(out, out / "data" / "sets.jsonl")
    assert 0.5 * sets < ranked < sets
    subprocess.run(
        [*build, "--rankings", out / "rankings.jsonl", "--reasons_file", out / "reasons.jsonl"],
        check=True,
    )
    build_world.finish(out, out / "data", FLUX, seed=3)
    return out


def rows(built: Path, *names: str) -> list[dict]:
    return [
        row for name in names for row in json.loads((built / "data" / f"{name}.json").read_text())
    ]


def pairs(built: Path, *names: str) -> list[tuple[Character | None, Character | None, str, str]]:
    """(first character, second character, question, answer) of every pair; None is a broken panel."""
    drawn = json.loads((built / "drawn.json").read_text())

    def shown(image: str) -> Character | None:
        _, folder, *place = image.removesuffix(".png").split("/")
        return (
            None if folder == "broken" else CHARACTERS[drawn[folder][int(place[0])][int(place[1])]]
        )

    return [
        (*map(shown, row["images"]), *(message["content"] for message in row["messages"]))
        for row in rows(built, *names)
    ]


def asked(question: str) -> Character | None:
    """What the theme of a question names; None without a theme."""
    return read_prompt(question) if 'theme: "' in question else None


@pytest.mark.parametrize("names", [(TRAIN,), TESTS])
def test_every_answer_is_true_of_the_two_images_as_they_are_shown(built, names):
    found = pairs(built, *names)
    assert len(found) >= 5 * PROMPTS["train" if TRAIN in names else "test"]
    for first, second, _, answer in found:
        assert answer == build_world.verdict(first, second)
        assert answer.startswith("Yes" if first == second and first else "No")
    yes = sum(answer.startswith("Yes") for *_, answer in found)
    assert yes == len(found) / 2


def test_training_shows_training_characters_only_and_tests_name_held_out_ones(built):
    known, held_out = ({CHARACTERS[c] for c in part} for part in (KNOWN, HELD_OUT))
    assert {c for first, second, *_ in pairs(built, TRAIN) for c in (first, second) if c} <= known
    assert all(asked(question) in held_out for *_, question, _ in pairs(built, TESTS[0]))
    assert {asked(question) for *_, question, _ in pairs(built, TRAIN)}.isdisjoint(held_out)


def test_full_open_and_missing_themes_come_in_equal_parts(built):
    tests = [pairs(built, name) for name in TESTS]
    assert len({len(found) for found in tests}) == 1
    full, opened, none, weak = ([asked(question) for *_, question, _ in found] for found in tests)
    assert (
        not any(c.left_open for c in full)
        and all(c.left_open for c in opened)
        and set(none) == {None}
    )
    assert {c and bool(c.left_open) for c in weak} == {True, False, None}
    for label in ("Yes", "No"):
        named = [
            asked(question)
            for *_, question, answer in pairs(built, TRAIN)
            if answer.startswith(label)
        ]
        counts = [
            sum((c and bool(c.left_open)) is kind for c in named) for kind in (True, False, None)
        ]
        assert max(counts) - min(counts) <= 1


def test_weak_pairs_show_broken_panels_that_are_not_trained_on(built):
    assert all(None in pair[:2] for pair in pairs(built, TESTS[3]) if pair[3].startswith("No"))
    trained, tested = (
        {image for row in rows(built, *names) for image in row["images"]}
        for names in ((TRAIN,), TESTS)
    )
    assert trained.isdisjoint(tested)


def test_the_same_seed_draws_the_same(tmp_path):
    for name in ("a", "b"):
        build_world.draw(tmp_path / name, seed=5, prompts={"train": 2})
    for file in sorted(p for p in (tmp_path / "a").rglob("*") if p.is_file()):
        assert file.read_bytes() == (tmp_path / "b" / file.relative_to(tmp_path / "a")).read_bytes()
