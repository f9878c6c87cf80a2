"""The shapes world, its oracle and its editing task."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from paco_grpo.data.prompts import load_prompts
from paco_grpo.types import Item
from paco_judge.files import read_json_lines
from paco_judge.grid import split_prompt
from paco_toy.build_world import build_prompts, build_rank_benchmark
from paco_toy.edits import (
    build_edits,
    oracle_edit,
    oracle_followed,
    oracle_kept,
    read_edits,
)
from paco_toy.oracle import Reading, evenness, oracle_between_images, read_grids, read_prompt
from paco_toy.world import (
    ATTRIBUTES,
    CHARACTER_INDEX,
    CHARACTERS,
    HELD_OUT,
    OPENINGS,
    SHAPES,
    VIEWS,
    Character,
    departed,
    grid_prompt,
    opened,
    render_grid,
    to_image,
    with_article,
)

FOUR_VIEWS = st.permutations(range(len(VIEWS))).map(lambda order: tuple(order[:4]))


def edited_of(edit):
    """The four characters after the edit."""
    return [*edit.characters[: edit.place], edit.result, *edit.characters[edit.place + 1 :]]


def draw(characters, views=(0, 3, 6, 9), side=32, seed=0):
    rng = np.random.default_rng(seed)
    shown = [CHARACTERS[c] for c in characters]
    return to_image(render_grid(shown, [VIEWS[v] for v in views], side, rng))


def test_a_departed_character_is_any_other():
    rng = np.random.default_rng(0)
    assert {departed(7, rng, 0.0) for _ in range(2000)} == set(range(len(CHARACTERS))) - {7}
    differences = Counter()
    for _ in range(400):
        other = CHARACTERS[departed(7, rng, 1.0)]
        differences[sum(getattr(other, a) != getattr(CHARACTERS[7], a) for a in ATTRIBUTES)] += 1
    assert differences == {1: 400}


@given(st.sampled_from(CHARACTERS), st.sampled_from([(), *OPENINGS]), FOUR_VIEWS)
def test_prompts_are_read_back_cut_by_the_real_parser_and_silent_on_what_is_open(
    character, attributes, views
):
    named = opened(character, attributes)
    prompt = grid_prompt(named, [VIEWS[v] for v in views])
    assert read_prompt(prompt) == named
    grid = split_prompt(prompt)
    assert (grid.rows, grid.cols) == (2, 2)
    assert [text.strip().rstrip(".") for text in grid.panels] == [str(VIEWS[v]) for v in views]
    assert {getattr(character, name) for name in attributes}.isdisjoint(
        grid.theme.replace(".", " ").split()
    )


def test_prompt_sets_open_color_and_style_equally_often_and_mix_kinds(tmp_path):
    build_prompts(tmp_path, seed=1, train=120, test=96)
    trained = {row["prompt"] for row in read_json_lines(tmp_path / "train_metadata.jsonl")}
    rows = read_json_lines(tmp_path / "test_metadata.jsonl")
    assert trained.isdisjoint(row["prompt"] for row in rows)
    openings = [read_prompt(row["prompt"]).left_open for row in rows]
    # Not the shape, which the base cannot draw.
    opened_sets = {(): 48, ("style",): 16, ("colour",): 16, ("style", "colour"): 16}
    assert Counter(openings) == opened_sets
    assert [row["open"] for row in rows] == [bool(opening) for opening in openings]
    assert list(Counter(row["category"] for row in rows).values()) == [24] * 4


def test_each_candidate_of_the_benchmark_differs_in_one_more_attribute(tmp_path):
    """They are listed in another order, so that a tie does not name the right one."""
    build_rank_benchmark(tmp_path, seed=2, items=6)
    prompts = read_json_lines(tmp_path / "prompt_data.jsonl")
    rankings = read_json_lines(tmp_path / "consistency_full_rank.jsonl")
    for prompt, row in zip(prompts, rankings, strict=True):
        grids = []
        for name in (row["ref_image"], *row["rank_images"]):
            panel = np.asarray(Image.open(tmp_path / "images" / row["folder"] / name))
            grids.append(Image.fromarray(np.tile(panel, (2, 2, 1))))
        reference, *candidates = [CHARACTERS[c] for c in read_grids(grids).character[:, 0]]
        assert f"views of {with_article(reference)}." in prompt["prompt"]
        for place, candidate in enumerate(candidates):
            changed = [a for a in ATTRIBUTES if getattr(candidate, a) != getattr(reference, a)]
            assert len(changed) == place
        assert row["comp_images"] == sorted(row["rank_images"])
    assert len({tuple(row["rank_images"]) for row in rankings}) > 1


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, len(CHARACTERS) - 1), min_size=4, max_size=4),
    FOUR_VIEWS,
    st.sampled_from([32, 64]),
    st.integers(0, 2**31),
)
def test_the_oracle_is_exact_on_clean_renderings(characters, views, side, seed):
    reading = read_grids([draw(characters, views, side, seed)])
    assert reading.valid.all()
    assert reading.character.tolist() == [characters]
    assert reading.view.tolist() == [list(views)]
    same = [a == b for i, a in enumerate(characters) for b in characters[i + 1 :]]
    assert reading.consistency()[0] == pytest.approx(np.mean(same))
    assert reading.distinctness()[0] == 1.0
    like_first = np.mean([c == characters[0] for c in characters])
    assert reading.alignment([CHARACTERS[characters[0]]])[0] == like_first


STAR = opened(Character("striped", "red", "star"), ["colour"])


def stars(*colours, shape="star"):
    return [CHARACTER_INDEX[Character("striped", colour, shape)] for colour in colours]


def reading_of(*grids):
    characters = np.array(grids)
    return Reading(characters, np.tile(np.arange(4), (len(grids), 1)), characters >= 0)


@pytest.mark.parametrize(
    "panels, agreement, alignment",
    [
        (stars("red", "red", "red", "red"), 1.0, 1.0),
        (stars("red", "red", "blue", "blue"), 2 / 6, 1.0),
        # The circle is not named.
        ([*stars("red", "red", "blue"), *stars("red", shape="circle")], 1 / 3, 0.75),
        ([*stars("red", "red"), -1, -1], 1.0, 0.5),
        ([-1] * 4, 0.0, 0.0),
    ],
)
def test_agreement_is_of_panels_that_show_what_is_named(panels, agreement, alignment):
    reading = reading_of(panels)
    assert reading.agreement([STAR]) == pytest.approx([agreement])
    assert reading.alignment([STAR]) == pytest.approx([alignment])
    num_valid = sum(panel >= 0 for panel in panels)  # all in other views
    assert reading.distinctness() == pytest.approx([num_valid * (num_valid - 1) / 12])
    assert (reading.consistency() > 0) == (num_valid > 0)


def test_between_images_counts_what_other_images_of_the_prompt_show():
    panels = [
        stars(*["red"] * 4),
        stars("red", "red", "blue", "blue"),
        stars(*["red"] * 4),
        stars(*["blue"] * 4, shape="cross"),
    ]
    images = [draw(characters) for characters in panels]
    open_prompt = grid_prompt(STAR, VIEWS[:4])
    full_prompt = grid_prompt(CHARACTERS[0], VIEWS[:4])
    items = [Item(item_id, open_prompt) for item_id in (0, 0, 1, 0)]
    score = oracle_between_images()
    # Of the panels' pairs, half are equal; an image alone is like no other.
    assert score(images, items) == pytest.approx([1 - 0.5 / 2, 1 - 0.5 / 2, 1.0, 1.0])
    assert score([images[0]] * 2, [Item(0, full_prompt)] * 2).tolist() == [1.0, 1.0]
    # Panels that show no character are like no other.
    assert score([Image.new("RGB", (64, 64), "gray")] * 2, items[:2]).tolist() == [1.0, 1.0]


def test_choice_is_the_entropy_of_the_value_that_most_panels_have():
    reds = stars(*["red"] * 4)
    blues = stars("blue", "blue", "blue", "red")
    tie = stars("red", "red", "blue", "blue")
    bit = np.log(2) / np.log(7)
    assert evenness(reading_of(reds, reds).choices([STAR] * 2, "colour")) == 0.0
    assert evenness(reading_of(reds, blues).choices([STAR] * 2, "colour")) == pytest.approx(bit)
    assert evenness(reading_of(tie).choices([STAR], "colour")) == pytest.approx(bit)
    entropy = np.log(4) - 3 / 4 * np.log(3)  # three quarters of the two images are red
    shares = reading_of(tie, reds).choices([STAR] * 2, "colour")
    assert evenness(shares) == pytest.approx(entropy / np.log(7))
    mixed = [*stars("red"), *stars("blue", "blue", "blue", shape="circle")]  # stars are named
    assert evenness(reading_of(reds, mixed).choices([STAR] * 2, "colour")) == 0.0
    # An image of a full prompt, and one without an answer, do not count.
    full = Character("striped", "blue", "star")
    assert evenness(reading_of(reds, blues, [-1] * 4).choices([STAR, full, STAR], "colour")) == 0.0
    assert np.isnan(evenness(reading_of(reds).choices([STAR], "shape")))


def test_the_data_set_of_edits_and_their_rewards(tmp_path):
    build_edits(tmp_path, seed=3, train=3, test=24)
    items = load_prompts(tmp_path, "test", "geneval_image")
    categories = [item.metadata["category"] for item in items]
    assert categories == ["training character", "held-out character"] * 12
    edits = read_edits(items)
    trained = read_edits(load_prompts(tmp_path, "train", "geneval_image"))
    assert len(set(trained + edits)) == 3 + 24
    assert [item.prompt for item in items] == [edit.instruction for edit in edits]
    for edit, category in zip(edits, categories, strict=True):
        before = edit.characters[edit.place]
        assert getattr(before, edit.attribute) != edit.value
        is_held_out = CHARACTER_INDEX[edit.result] in HELD_OUT
        assert is_held_out == (category == "held-out character")
    references = [item.image for item in items]
    edited = [to_image(render_grid(edited_of(edit), edit.views, 32)) for edit in edits]
    # Every panel but the edited one shows another character in another view.
    others = []
    moved = []  # the edited panel is right, but in another view
    reshaped = []  # it has the value, but another shape
    for edit in edits:
        (character,) = [c for c in CHARACTERS[:5] if c.shape == edit.result.shape]
        panels = [character] * 4
        panels[edit.place] = edit.result
        views = [VIEWS[VIEWS.index(view) - 3] for view in edit.views]
        views[edit.place] = edit.views[edit.place]
        others.append(to_image(render_grid(panels, views, 32)))
        views = list(edit.views)
        views[edit.place] = VIEWS[VIEWS.index(edit.views[edit.place]) - 3]
        moved.append(to_image(render_grid(edited_of(edit), views, 32)))
        panels = list(edited_of(edit))
        shape = SHAPES[SHAPES.index(edit.result.shape) - 1]
        panels[edit.place] = Character(edit.result.style, edit.result.colour, shape)
        reshaped.append(to_image(render_grid(panels, edit.views, 32)))
    blank = [Image.new("RGB", (64, 64), "white")] * len(edits)
    cases = [(edited, 1, 1), (references, 0, 1), (others, 1, 2 / 8), (blank, 0, 0)]
    cases += [(moved, 1, 7 / 8), (reshaped, 0, 1)]
    for images, followed, kept in cases:
        assert set(oracle_followed()(images, items)) == {followed}
        assert set(oracle_kept()(images, items)) == {kept}
        assert set(oracle_edit()(images, items)) == {np.sqrt(followed * kept)}
