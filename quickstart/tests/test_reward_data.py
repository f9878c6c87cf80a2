"""The judge's toy pairs, as run.sh makes them: drawn, ranked and explained, and paired."""

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from paco_reward.cli import main
from paco_toy import build_world
from paco_toy.build_world import TESTS, TRAIN
from paco_toy.oracle import read_prompt
from paco_toy.world import CHARACTERS, HELD_OUT, KNOWN, Character

PROMPTS = {"train": 40, "test": 10}


class Pair(NamedTuple):
    images: list[str]
    shown: tuple[Character | None, ...]  # None: a broken panel
    named: Character | None  # by the question's theme; None: no theme
    answer: str


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> dict[str, list[Pair]]:
    world = tmp_path_factory.mktemp("world")
    drawn = world / "drawn"
    data = world / "reward_data"
    build_world.draw(drawn, seed=3, prompts=PROMPTS)
    inputs = ["--grids", f"{drawn}/grids", "--metadata", f"{drawn}/metadata.jsonl"]
    build = ["build-dataset", "--name", "toy_pairs", "--output", f"{data}", *inputs]
    assert main([*build, "--sets_only"]) == 0
    ranked, total = build_world.annotate(drawn, data / "sets.jsonl")
    assert 0.5 * total < ranked < total
    labels = ["--rankings", f"{drawn}/rankings.jsonl", "--reasons_file", f"{drawn}/reasons.jsonl"]
    assert main([*build, *labels]) == 0
    build_world.finish(drawn, data, seed=3)
    characters = json.loads((drawn / "drawn.json").read_text())

    def shown(image: str) -> Character | None:
        _, folder, *place = Path(image).with_suffix("").parts
        if folder == "broken":
            return None
        generation, panel = map(int, place)
        return CHARACTERS[characters[folder][generation][panel]]

    pairs = {}
    for name in (TRAIN, *TESTS):
        pairs[name] = []
        for row in json.loads((data / f"{name}.json").read_text()):
            question, answer = [message["content"] for message in row["messages"]]
            named = read_prompt(question) if 'theme: "' in question else None
            pairs[name].append(Pair(row["images"], (*map(shown, row["images"]),), named, answer))
    return pairs


def kind_of(pair: Pair) -> str:
    if pair.named is None:
        return "none"
    return "open" if pair.named.left_open else "full"


@pytest.mark.parametrize("names", [(TRAIN,), TESTS])
def test_every_answer_is_true_of_the_two_images_as_they_are_shown(sets, names):
    pairs = [pair for name in names for pair in sets[name]]
    assert len(pairs) >= 5 * PROMPTS["train" if TRAIN in names else "test"]
    for pair in pairs:
        first, second = pair.shown
        assert pair.answer == build_world.verdict(first, second)
        assert pair.answer.startswith("Yes" if first == second and first else "No")
    assert sum(pair.answer.startswith("Yes") for pair in pairs) == len(pairs) / 2


def test_training_shows_training_characters_only_and_tests_name_held_out_ones(sets):
    shown = {character for pair in sets[TRAIN] for character in pair.shown} - {None}
    assert shown <= {CHARACTERS[number] for number in KNOWN}
    held_out = {CHARACTERS[number] for number in HELD_OUT}
    assert held_out.isdisjoint(pair.named for pair in sets[TRAIN])
    named = {pair.named for pair in sets[TESTS[0]]}
    assert named <= {CHARACTERS[number] for number in HELD_OUT}


@pytest.mark.parametrize("name", [TRAIN, *TESTS])
def test_the_first_rows_have_both_answers_and_kinds_of_both(sets, name):
    pairs = sets[name]
    some = pairs[: len(pairs) // 4]  # as with max_samples
    share = sum(pair.answer.startswith("Yes") for pair in some) / len(some)
    assert 0.25 < share < 0.75
    assert set(map(kind_of, some)) == set(map(kind_of, pairs))


def test_full_open_and_missing_themes_come_in_equal_parts(sets):
    assert len({len(sets[name]) for name in TESTS}) == 1
    kinds = [set(map(kind_of, sets[name])) for name in TESTS]
    assert kinds == [{"full"}, {"open"}, {"none"}, {"full", "open", "none"}]
    for label in ("Yes", "No"):
        labeled = [pair for pair in sets[TRAIN] if pair.answer.startswith(label)]
        least, _, most = sorted(Counter(map(kind_of, labeled)).values())
        assert most - least <= 1


def test_weak_pairs_show_broken_panels_that_are_not_trained_on(sets):
    weak = [pair for pair in sets[TESTS[3]] if pair.answer.startswith("No")]
    assert all(None in pair.shown for pair in weak)
    trained = {image for pair in sets[TRAIN] for image in pair.images}
    tested = {image for name in TESTS for pair in sets[name] for image in pair.images}
    assert trained.isdisjoint(tested)
