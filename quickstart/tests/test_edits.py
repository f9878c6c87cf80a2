"""The editing task of the shapes world, and its oracle."""


import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from paco_grpo.data.prompts import load_prompts
from paco_toy.edits import (
    build_edits,
    draw_scene,
    judge_edits,
    oracle_edit,
    oracle_followed,
    oracle_kept,
    random_edit,
    read_edit,
)
from paco_toy.world import VIEWS, split_characters

STILL = [(0.0, 0.0)] * 4
KNOWN, HELD_OUT = split_characters()


def edit_of(seed, results=KNOWN):
    return random_edit(np.random.default_rng(seed), KNOWN, results)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([32, 64, 128]))
def test_the_oracle_is_exact_on_clean_renderings(seed, side):
    edit = edit_of(seed)
    perfect = draw_scene(edit.edited(), edit.views, side, STILL)
    untouched = draw_scene(edit.characters, edit.views, side, STILL)
    # every other panel shows another character elsewhere
    others = [edit.result if i == edit.place else edit_of(seed + i + 1).result for i in range(4)]
    others = [c if i == edit.place or c != edit.characters[i] else edit.result for i, c in enumerate(others)]
    moved = [v if i == edit.place else VIEWS[(VIEWS.index(v) + 3) % len(VIEWS)] for i, v in enumerate(edit.views)]
    careless = draw_scene(others, moved, side, STILL)
    blank = Image.new("RGB", (side, side), "white")
    followed, kept = judge_edits([perfect, untouched, careless, blank], [edit] * 4)
    assert followed.tolist() == [1, 0, 1, 0]
    assert kept.tolist() == [1, 1, 2 / 8, 0]


def test_rewards_by_import_path_and_the_data_set(tmp_path):
    build_edits(tmp_path, seed=3, train=3, test=4)
    items = load_prompts(tmp_path, "test", "geneval_image")
    assert [item.metadata["category"] for item in items] == ["training character", "held-out character"] * 2
    edits = [read_edit(item.metadata) for item in items]
    assert [item.prompt for item in items] == [edit.instruction for edit in edits]
    references = [item.image for item in items]
    assert {image.size for image in references} == {(128, 128)}
    assert oracle_followed()(references, items).tolist() == [0] * 4
    assert oracle_kept()(references, items).tolist() == [1] * 4
    perfect = [draw_scene(edit.edited(), edit.views, 64, STILL) for edit in edits]
    assert oracle_edit()(perfect, items).tolist() == [1] * 4
    assert oracle_edit()(references, items).tolist() == [0] * 4
    again = tmp_path / "again"
    build_edits(again, seed=3, train=3, test=4)
    for file in ("train_metadata.jsonl", "test_metadata.jsonl", "images/test_0001.png"):
        assert (again / file).read_bytes() == (tmp_path / file).read_bytes()
