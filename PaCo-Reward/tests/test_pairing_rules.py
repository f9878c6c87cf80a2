"""build-dataset: properties of labels, splits, balance, duplicates, reasons and the journal."""

from collections import Counter

import numpy as np
import pytest
from PIL import Image

from paco_reward.pairing import select
from paco_reward.pairing.answers import read_reason, split_verdict
from paco_reward.pairing.inputs import Ranking
from paco_reward.pairing.select import LabeledPair, labels_of_ranking
from paco_toy.world import CHARACTERS, VIEWS, assemble_grid, render_panel, to_uint8


def ranking(reference: str, names: list[str], **more) -> Ranking:
    return Ranking(folder="f", ref_image=reference, rank_images=names, **more)


def test_the_best_are_yes_and_the_worst_no():
    one = ranking("ref", list("abcd"), scores=[0.9, 0.6, 0.5, 0.1])
    assert labels_of_ranking(one, 1, 2, 0.4) == [("a", True), ("c", False), ("d", False)]
    assert labels_of_ranking(one, 1, 2, 0.41) is None and labels_of_ranking(one, 3, 2, 0) is None


def test_groups_are_connected_directly_or_through_others():
    shown = ["ab", "cd", "ef", "bx", "xd", "gg"]
    leader = {name: name for name in "abcdefg"} | {"x": "c"}  # a near-duplicate
    pairs = [LabeledPair(*names, "q", True, "pair", "") for names in shown]
    groups = [pair.group for pair in select.connected(pairs, leader)]
    assert groups == ["a", "a", "e", "a", "a", "g"]


def test_near_duplicates_differ_from_other_colors_and_shapes(tmp_path):
    # Grids, because a single centred shape is symmetric: the signs of its zero frequencies are noise.
    def grid(colour, views):
        (character,) = [c for c in CHARACTERS if (c.style, c.shape, c.colour) == (*look, colour)]
        return assemble_grid([render_panel(character, VIEWS[view], 48) for view in views])

    look = (CHARACTERS[0].style, CHARACTERS[0].shape)
    base = grid(CHARACTERS[0].colour, (1, 3, 7, 5))
    shown = {
        "a": base,
        "b": base + np.random.default_rng(0).normal(scale=0.01, size=base.shape),
        "c": grid("blue", (1, 3, 7, 5)),
        "d": grid(CHARACTERS[0].colour, (5, 7, 3, 1)),
        "e": 0.95 * base,  # the same hash, and a thumbnail that is darker by more than 6 of 255
    }
    for name, image in shown.items():
        Image.fromarray(to_uint8(image)).save(tmp_path / f"{name}.png")
    leader = select.leaders([f"{name}.png" for name in shown], tmp_path, 6)
    assert [leader[f"{name}.png"][0] for name in shown] == ["a", "a", "c", "d", "e"]


PAIRS = [  # first, second, label, kind, and whether it is kept
    ("a", "b", True, "theme", True),
    ("b", "a2", True, "theme", False),  # again, in the other order
    ("a", "a2", True, "theme", False),  # a copy
    ("a", "c", True, "theme", False),
    ("c2", "a", False, "theme", False),  # contradicts the previous one
    ("a", "a2", True, "editing_consistency", True),
    ("a2", "a", True, "editing_consistency", False),  # again
]


def test_repeated_and_disputed_pairs_are_left_out():
    pairs = []
    expected = []
    for first, second, label, kind, is_kept in PAIRS:
        pairs.append(LabeledPair(first, second, "q", label, kind, "g"))
        expected += pairs[-1:] * is_kept
    counts = Counter()
    leader = {"a": "a", "a2": "a", "b": "b", "c": "c", "c2": "c"}
    assert select.without_duplicates(pairs, leader, counts) == expected
    assert counts == {"repeated": 2, "near_duplicate": 1, "repeated_disputed": 2}


@pytest.mark.parametrize(
    ("answer", "says_yes", "reasons"),
    [
        ("**No**, the hair\n differs in colour.", False, "The hair differs in colour."),
        ("**Yes** both show it.", True, "Both show it."),
        ('"yes" - the same fox in both.', True, "The same fox in both."),
        ("NO: “Luna” is missing", False, "“Luna” is missing"),
        ("Yes both are red", True, "Both are red"),
        ("> _NO_: the hat is missing here.", False, "The hat is missing here."),
        ("No.", False, ""),
        ("No difference can be seen.", None, "No difference can be seen."),
        ("no-one is the same in the two.", None, "No-one is the same in the two."),
        ("Yesterday both were the same.", None, "Yesterday both were the same."),
        ("both are red", None, "Both are red"),
    ],
)
def test_verdict_and_reasons_of_a_written_answer(answer, says_yes, reasons):
    assert split_verdict(answer) == (says_yes, reasons)
    expected = None
    if says_yes is not None and len(reasons) >= 12:
        expected = ("Yes" if says_yes else "No", reasons)
    assert read_reason(answer) == expected
