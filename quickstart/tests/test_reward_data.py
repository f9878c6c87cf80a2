"""The judge's toy pairs.

They are drawn, paired by `paco-reward build-dataset`, and ranked and explained from what the panels
show.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from paco_reward.cli import main
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
    inputs = ["--grids", f"{out}/grids", "--metadata", f"{out}/metadata.jsonl"]
    build = ["build-dataset", "--name", "toy_pairs", "--output", f"{out}/data", *inputs]
    assert main([*build, "--sets_only"]) == 0
    ranked, sets = build_world.annotate(out, out / "data" / "sets.jsonl")
    assert 0.5 * sets < ranked < sets
    labels = ["--rankings", f"{out}/rankings.jsonl", "--reasons_file", f"{out}/reasons.jsonl"]
    assert main([*build, *labels]) == 0
    build_world.finish(out, out / "data", FLUX, seed=3)
    return out


def rows(built: Path, *names: str) -> list[dict]:
    return [
        row for name in names for row in json.loads((built / "data" / f"{name}.json").read_text())
    ]


def pairs(built: Path, *names: str) -> list[tuple[Character | None, Character | None, str, str]]:
    """(first character, second character, question, answer) of every pair.

    None is a broken panel.
    """
    drawn = json.loads((built / "drawn.json").read_text())

    def shown(image: str) -> Character | None:
        _, folder, *place = image.removesuffix(".png").split("/")
        if folder == "broken":
            return None
        generation, panel = place
        return CHARACTERS[drawn[folder][int(generation)][int(panel)]]

    result = []
    for row in rows(built, *names):
        first, second = map(shown, row["images"])
        question, answer = [message["content"] for message in row["messages"]]
        result.append((first, second, question, answer))
    return result


def named_in(question: str) -> Character | None:
    """What the theme of a question names; None without a theme."""
    return read_prompt(question) if 'theme: "' in question else None


def kind_of(pair: tuple) -> str:
    """The kind of theme in a pair's question."""
    named = named_in(pair[2])
    if named is None:
        return "none"
    return "open" if named.left_open else "full"


@pytest.mark.parametrize("names", [(TRAIN,), TESTS])
def test_every_answer_is_true_of_the_two_images_as_they_are_shown(built, names):
    judged = pairs(built, *names)
    assert len(judged) >= 5 * PROMPTS["train" if TRAIN in names else "test"]
    for first, second, _, answer in judged:
        assert answer == build_world.verdict(first, second)
        assert answer.startswith("Yes" if first == second and first else "No")
    yes = sum(answer.startswith("Yes") for *_, answer in judged)
    assert yes == len(judged) / 2


def test_training_shows_training_characters_only_and_tests_name_held_out_ones(built):
    known, held_out = ({CHARACTERS[c] for c in part} for part in (KNOWN, HELD_OUT))
    assert {c for first, second, *_ in pairs(built, TRAIN) for c in (first, second) if c} <= known
    assert all(named_in(question) in held_out for *_, question, _ in pairs(built, TESTS[0]))
    assert {named_in(question) for *_, question, _ in pairs(built, TRAIN)}.isdisjoint(held_out)


def test_full_open_and_missing_themes_come_in_equal_parts(built):
    tests = [pairs(built, name) for name in TESTS]
    assert len({len(test) for test in tests}) == 1
    full, opened, none, weak = [[kind_of(pair) for pair in test] for test in tests]
    assert set(full) == {"full"}
    assert set(opened) == {"open"}
    assert set(none) == {"none"}
    assert set(weak) == {"full", "open", "none"}
    for label in ("Yes", "No"):
        kinds = [kind_of(pair) for pair in pairs(built, TRAIN) if pair[3].startswith(label)]
        counts = Counter(kinds)
        assert set(counts) == {"full", "open", "none"}
        assert max(counts.values()) - min(counts.values()) <= 1


def test_weak_pairs_show_broken_panels_that_are_not_trained_on(built):
    assert all(None in pair[:2] for pair in pairs(built, TESTS[3]) if pair[3].startswith("No"))
    trained = {image for row in rows(built, TRAIN) for image in row["images"]}
    tested = {image for row in rows(built, *TESTS) for image in row["images"]}
    assert trained.isdisjoint(tested)
