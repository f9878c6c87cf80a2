"""The shapes world and its oracle."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from paco_judge.grid import split_prompt
from paco_toy.oracle import read_grids, read_prompt
from paco_toy.world import (
    CHARACTERS,
    VIEWS,
    assemble_grid,
    departed,
    grid_prompt,
    random_jitter,
    render_panel,
    split_characters,
    to_uint8,
)

four_views = st.permutations(range(len(VIEWS))).map(lambda order: tuple(order[:4]))


def draw(characters, views, side, rng):
    panels = [render_panel(CHARACTERS[c], VIEWS[v], side, random_jitter(rng)) for c, v in zip(characters, views)]
    return Image.fromarray(to_uint8(assemble_grid(panels)))


@given(st.integers(0, len(CHARACTERS) - 1), four_views)
def test_prompts_are_read_back_and_cut_by_the_real_parser(character, views):
    prompt = grid_prompt(CHARACTERS[character], [VIEWS[v] for v in views])
    assert read_prompt(prompt) == (character, views)
    grid = split_prompt(prompt)
    assert (grid.rows, grid.cols) == (2, 2)
    assert [text.strip().rstrip(".") for text in grid.panels] == [str(VIEWS[v]) for v in views]


@pytest.mark.parametrize("text", ["", "2x2 grid layout depicting a filled red dog.", "a cat"])
def test_other_prompts_are_refused(text):
    with pytest.raises(ValueError, match="not a prompt of the shapes world"):
        read_prompt(text)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, len(CHARACTERS) - 1), min_size=4, max_size=4),
    four_views,
    st.sampled_from([32, 64]),
    st.integers(0, 2**31),
)
def test_the_oracle_is_exact_on_clean_renderings(characters, views, side, seed):
    reading = read_grids([draw(characters, views, side, np.random.default_rng(seed))])
    assert reading.valid.all()
    assert reading.character.tolist() == [characters]
    assert reading.view.tolist() == [list(views)]
    same = [a == b for i, a in enumerate(characters) for b in characters[i + 1 :]]
    assert reading.consistency()[0] == pytest.approx(np.mean(same))
    assert reading.distinctness()[0] == 1.0
    assert reading.alignment(np.array(characters[:1]))[0] == np.mean([c == characters[0] for c in characters])


def test_four_identical_panels_are_consistent_but_not_distinct():
    reading = read_grids([draw([3] * 4, [1] * 4, 32, np.random.default_rng(0))])
    assert reading.consistency()[0] == 1.0
    assert reading.distinctness()[0] == 0.0


@pytest.mark.parametrize("level", [255, 128, 0])
def test_empty_or_flat_panels_are_invalid(level):
    reading = read_grids([Image.new("RGB", (64, 64), (level,) * 3)])
    assert not reading.valid.any()
    assert reading.consistency()[0] == 0.0


def test_noise_is_invalid():
    pixels = np.random.default_rng(0).integers(0, 256, (128, 128, 3), dtype=np.uint8)
    assert not read_grids([Image.fromarray(pixels)]).valid.any()


def test_held_out_characters_are_the_same_for_every_seed_and_apart():
    known, held_out = split_characters()
    assert len(held_out) == 21
    assert sorted((*known, *held_out)) == list(range(len(CHARACTERS)))


@given(st.integers(0, len(CHARACTERS) - 1), st.integers(0, 2**31))
def test_a_departed_character_is_another_one(character, seed):
    assert departed(character, np.random.default_rng(seed)) != character
