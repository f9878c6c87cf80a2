"""build-dataset: properties of labels, splits, balance, duplicates, reasons and the journal."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from paco_judge.grid import GridPrompt
from paco_reward.pairing import select
from paco_reward.pairing.answers import read_reason, split_verdict
from paco_reward.pairing.inputs import PromptItem, Ranking, connected
from paco_reward.pairing.select import LabeledPair, labels_of_ranking, pairs_of_rankings
from paco_toy.world import CHARACTERS, VIEWS, assemble_grid, render_panel, to_uint8


def of_colour(character: int, colour: str) -> int:
    """The number of a character that differs in its color alone."""
    style = CHARACTERS[character].style
    shape = CHARACTERS[character].shape
    looks = [(c.style, c.shape, c.colour) for c in CHARACTERS]
    return looks.index((style, shape, colour))


def ranking(reference: str, names: list[str], **more) -> Ranking:
    return Ranking(folder="f", ref_image=reference, rank_images=names, **more)


def test_the_best_are_yes_and_the_worst_no():
    one = ranking("ref", list("abcd"), scores=[0.9, 0.6, 0.5, 0.1])
    assert labels_of_ranking(one, 1, 2, 0.4) == [("a", True), ("c", False), ("d", False)]
    assert labels_of_ranking(one, 1, 2, 0.41) is None and labels_of_ranking(one, 3, 2, 0) is None


@settings(max_examples=60)
@given(
    st.lists(st.permutations(range(5)).map(lambda p: (p[0], p[1:])), min_size=1, max_size=30),
    st.integers(0, 99),
)
def test_each_pair_of_images_is_labeled_once_by_majority(orders, seed):
    item = PromptItem("f", "p", GridPrompt("theme", ("p",), 1, 1), "here", "g", "", {}, [])
    rankings = [ranking(f"{ref}.png", [f"{i}.png" for i in order]) for ref, order in orders]
    counts = Counter()
    labeled = [(one, labels_of_ranking(one, 1, 2, 0)) for one in rankings]
    made = pairs_of_rankings(labeled, {"f": item}, {"f": "?"}, seed, counts)
    votes = {}
    for ref, order in orders:
        for other, vote in ((order[0], 1), (order[-1], -1), (order[-2], -1)):
            key = frozenset((f"images/f/{ref}.png", f"images/f/{other}.png"))
            votes[key] = votes.get(key, 0) + vote
    expected = {key: vote > 0 for key, vote in votes.items() if vote}
    assert {frozenset((pair.first, pair.second)): pair.label for pair in made} == expected
    assert len(made) == len(expected) and counts["pairs_disputed"] == len(votes) - len(expected)


def test_groups_are_connected_directly_or_through_others():
    assert connected(["ab", "cd", "ef", "bc", "g", "gg"]) == [0, 0, 2, 0, 4, 4]


def test_near_duplicates_differ_from_other_colors_and_shapes(tmp_path):
    # Grids, because a single centred shape is symmetric: the signs of its zero frequencies are noise.
    def pixels(character, views):
        return assemble_grid([render_panel(CHARACTERS[character], view, 48) for view in views])

    views = [VIEWS[number] for number in (1, 3, 7, 5)]
    base = pixels(0, views)
    shown = {
        "a": base,
        "b": base + np.random.default_rng(0).normal(scale=0.01, size=base.shape),
        "c": pixels(of_colour(0, "blue"), views),
        "d": pixels(0, views[::-1]),
        "e": pixels(3, views),
        "f": 0.95 * base,  # the same hash, and a thumbnail that is darker by more than 6 of 255
    }
    for name, image in shown.items():
        Image.fromarray(to_uint8(image)).save(tmp_path / f"{name}.png")
    leader = select.leaders([f"{name}.png" for name in shown], tmp_path, 6)
    assert leader == {
        "a.png": "a.png",
        "b.png": "a.png",
        "c.png": "c.png",
        "d.png": "d.png",
        "e.png": "e.png",
        "f.png": "f.png",
    }


def test_repeated_and_disputed_pairs_are_left_out():
    def pair(first, second, label=True, kind="theme", question="q"):
        return LabeledPair(first, second, question, label, kind, "g")

    leader = {"a": "a", "a2": "a", "b": "b", "c": "c", "c2": "c"}
    counts = Counter()
    kept = select.without_duplicates(
        [
            pair("a", "b"),
            pair("b", "a2"),  # again, in the other order
            pair("a", "a2"),  # a copy
            pair("a", "c"),
            pair("c2", "a", label=False),  # contradicts the previous one
            pair("a", "a2", kind="editing_consistency"),
            pair("a2", "a", kind="editing_consistency"),  # again
        ],
        leader,
        counts,
    )
    assert [(p.first, p.second, p.kind, p.question) for p in kept] == [
        ("a", "b", "theme", "q"),
        ("a", "a2", "editing_consistency", "q"),
    ]
    assert counts == {"repeated": 2, "near_duplicate": 1, "repeated_disputed": 2}


@pytest.mark.parametrize(
    ("answer", "says_yes", "reasons"),
    [
        ("**No**, the hair\n differs in colour.", False, "The hair differs in colour."),
        ("**Yes** both show it.", True, "Both show it."),
        ('"yes" - the same fox in both.', True, "The same fox in both."),
        ("Yes. because both are red", True, "Because both are red"),
        ("NO: “Luna” is missing", False, "“Luna” is missing"),
        ("no\nThe hat differs.", False, "The hat differs."),
        ("Yes both are red", True, "Both are red"),
        ("> _NO_: the hat is missing here.", False, "The hat is missing here."),
        ("Yes", True, ""),
        ("No.", False, ""),
        ("No difference can be seen.", None, "No difference can be seen."),
        ("no-one is the same in the two.", None, "No-one is the same in the two."),
        ("Yesterday both were the same.", None, "Yesterday both were the same."),
        ("nothing of it is the same.", None, "Nothing of it is the same."),
        ("both are red", None, "Both are red"),
    ],
)
def test_verdict_and_reasons_of_a_written_answer(answer, says_yes, reasons):
    assert split_verdict(answer) == (says_yes, reasons)
    expected = None
    if says_yes is not None and len(reasons) >= 12:
        expected = ("Yes" if says_yes else "No", reasons)
    assert read_reason(answer) == expected


def test_reasons_that_stand_for_an_image_are_not_learned():
    assert read_reason("Yes. Look at <|image_pad|> and its colours.") is None
