"""The judge's toy pairs: drawn, paired by `paco-reward build-dataset`, ranked and explained from the recorded contents."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paco_toy import reward_data
from paco_toy.world import CHARACTERS, split_characters

PROMPTS = {"train": 40, "test": 10}


def paco_reward(*arguments: object) -> None:
    command = [str(Path(sys.executable).parent / "paco-reward"), "build-dataset", *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("world")
    reward_data.draw(out, seed=3, prompts=PROMPTS)
    build = ["--grids", out / "grids", "--metadata", out / "metadata.jsonl", "--output", out / "data", "--name", "toy_pairs"]
    paco_reward(*build, "--sets_only")
    ranked, sets = reward_data.annotate(out, out / "data" / "sets.jsonl")
    assert 0.5 * sets < ranked < sets
    paco_reward(*build, "--rankings", out / "rankings.jsonl", "--reasons_file", out / "reasons.jsonl")
    return out


def pairs(built: Path, split: str) -> list[tuple[int, int, str, str]]:
    """(first character, second character, question, answer) of every pair, by what was drawn."""
    drawn = json.loads((built / "drawn.json").read_text())

    def shown(image: str) -> int:
        _, folder, generation, panel = image.removesuffix(".png").split("/")
        return drawn[folder][int(generation)][int(panel)]

    rows = json.loads((built / "data" / f"toy_pairs_cot_{split}.json").read_text())
    return [(*map(shown, row["images"]), row["messages"][0]["content"], row["messages"][1]["content"]) for row in rows]


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_answer_is_true_of_the_two_images_as_they_are_shown(built, split):
    found = pairs(built, split)
    assert len(found) >= 5 * PROMPTS[split]
    for first, second, _, answer in found:
        assert answer == reward_data.verdict(CHARACTERS[first], CHARACTERS[second])
    yes = sum(answer.startswith("Yes") for *_, answer in found)
    assert yes == len(found) / 2


def test_training_shows_training_characters_only_and_tests_name_held_out_ones(built):
    known, held_out = (set(part) for part in split_characters())
    assert {c for first, second, *_ in pairs(built, "train") for c in (first, second)} <= known
    names = {str(CHARACTERS[c]) for c in held_out}
    assert all(any(f" {name}." in question for name in names) for *_, question, _ in pairs(built, "test"))


def test_the_theme_gives_nothing_away(built):
    """Of the pairs whose first image shows the named character, about half are Yes; as of the others."""
    found = pairs(built, "train")
    for shows_it in (True, False):
        labels = [answer.startswith("Yes") for first, _, question, answer in found if (f" {CHARACTERS[first]}." in question) == shows_it]
        assert len(labels) > 40 and 0.3 < sum(labels) / len(labels) < 0.7


def test_the_same_seed_draws_the_same(tmp_path):
    for name in ("a", "b"):
        reward_data.draw(tmp_path / name, seed=5, prompts={"train": 2})
    for file in sorted(p for p in (tmp_path / "a").rglob("*") if p.is_file()):
        assert file.read_bytes() == (tmp_path / "b" / file.relative_to(tmp_path / "a")).read_bytes()
