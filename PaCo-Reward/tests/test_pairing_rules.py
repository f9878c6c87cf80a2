"""build-dataset: properties of labels, splits, balance, duplicates, reasons and the journal."""

from argparse import Namespace
from collections import Counter

import imagehash
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pairing_tools import noise
from PIL import Image

from paco_judge.questions import EDITING
from paco_reward.pairing import build, select
from paco_reward.pairing.answers import split_verdict
from paco_reward.pairing.inputs import Ranking
from paco_reward.pairing.select import LabeledPair, labels_of_ranking
from paco_reward.pairing.splits import Split


def ranking(reference: str, names: list[str], **more) -> Ranking:
    return Ranking(folder="f", ref_image=reference, rank_images=names, **more)


def test_the_best_are_yes_and_the_worst_no():
    one = ranking("ref", list("abcd"), scores=[0.9, 0.6, 0.5, 0.1])
    assert labels_of_ranking(one, 1, 2, 0.4) == [("a", True), ("c", False), ("d", False)]
    assert labels_of_ranking(one, 1, 2, 0.41) is None and labels_of_ranking(one, 3, 2, 0) is None
    assert labels_of_ranking(one, 2, 1, 0.51) is None  # between the last Yes and the first No


def test_where_rankings_disagree_the_majority_decides_and_a_tie_leaves_the_pair_out():
    votes = [("a", "b", True), ("b", "a", False), ("c", "d", False), ("d", "c", False)]
    votes.append(("c", "d", True))
    ranked = [(ranking(ref, [name, "x"]), [(name, label)]) for ref, name, label in votes]
    orders = set()
    for seed in range(8):
        counts = Counter()
        (pair,) = select.pairs_of_rankings(ranked, {"f": "g"}, {"f": "q"}, seed, counts)
        orders.add((pair.first, pair.second))
        assert not pair.label and counts["pairs_disputed"] == 1
    assert orders == {("images/f/c", "images/f/d"), ("images/f/d", "images/f/c")}


def test_groups_are_connected_directly_or_through_others():
    shown = ["ab", "cd", "ef", "bx", "xd", "gg"]
    leader = {name: name for name in "abcdefg"} | {"x": "c"}  # a near-duplicate
    pairs = [LabeledPair(*names, "q", True, "pair") for names in shown]
    groups = [pair.group for pair in select.with_groups(pairs, leader)]
    assert groups == ["a", "a", "e", "a", "a", "g"]


def test_near_duplicates_differ_from_other_colors_and_shapes(tmp_path):
    pixels = np.asarray(noise(1)).astype(int)
    shown = {
        "a": pixels,
        "b": pixels + np.random.default_rng(0).integers(-2, 3, pixels.shape),
        "c": pixels - 12,  # the same hash
        "d": np.asarray(noise(2)),
    }
    for name, image in shown.items():
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(tmp_path / name, "PNG")
    assert select.leaders(shown, tmp_path, 6) == {"a": "a", "b": "a", "c": "c", "d": "d"}


@pytest.mark.parametrize(
    ("kind", "option", "kept"),
    [("editing_consistency", None, 2), ("pair", "pairs", 4), ("pair", "mend", 4)],
)
def test_pairs_of_near_duplicates_are_one_group(kind, option, kept, tmp_path):
    """A user's are all kept: what makes them differ may be what the judge is to learn."""
    for number, name in enumerate("aabbce"):
        image = noise(ord(name))
        if number % 2:
            image.putpixel((0, 0), (1, 2, 3))
            name = name.upper()
        image.save(tmp_path / name, "PNG")
    shown = [
        ("a", "b", "q", True),
        ("A", "B", "q", False),
        ("a", "c", "r", True),
        ("A", "E", "s", True),
    ]
    labeled = [LabeledPair(*pair, kind) for pair in shown]
    files = {name: name == option for name in ("pairs", "mend")}
    options = Namespace(output=tmp_path, duplicate_bits=4, seed=1, **files)
    pairs = build.clean(labeled, options, Counter())
    assert len(pairs) == kept and len({pair.group for pair in pairs}) == 1


def test_near_duplicates_on_both_sides_of_an_earlier_split_are_for_training():
    split = Split(images={"a": "train", "b": "test", "c": "train", "d": "test"})
    leader = {"a": "a", "b": "a", "c": "c", "d": "d"}
    pairs = [LabeledPair(*names, "q", True, "pair") for names in ("ac", "bd")]
    counts = Counter()
    assert split.without_crossing(pairs, leader, counts) == pairs[:1]
    assert counts == {"across_the_split": 1}


def test_near_duplicates_differ_in_so_many_bits_as_stated(tmp_path):
    """Pale pictures: only their hashes differ."""
    hashes = []
    for number, name in enumerate("ab"):
        pale = Image.fromarray(np.asarray(noise(number)) // 64 + 200)
        pale.save(tmp_path / name, "PNG")
        hashes.append(imagehash.phash(pale))
    bits = hashes[0] - hashes[1]
    assert select.leaders("ab", tmp_path, bits) == {"a": "a", "b": "a"}
    assert select.leaders("ab", tmp_path, bits - 1) == {"a": "a", "b": "b"}


def test_the_seed_decides_which_share_of_the_groups_is_for_testing():
    """Groups of different sizes, each with both labels."""
    pairs = []
    for number, group in enumerate("abcdefgh"):
        for label in (True, False):
            for copy in range(5 + number):
                pairs.append(LabeledPair(f"{group}{copy}", "x", "q", label, "theme", group))
    testing = {frozenset(select.groups_for_testing(pairs, 0.35, seed)) for seed in range(9)}
    assert len(testing) > 1 and set(map(len, testing)) == {3}


KINDS = (*EDITING, "pair")
GROUPS = st.lists(st.tuples(st.sampled_from(KINDS), st.booleans()), min_size=1, max_size=4)


@given(
    st.lists(GROUPS, max_size=12) | st.lists(GROUPS.map(lambda group: group[:1]), max_size=24),
    st.sampled_from([0.0, 0.05, 0.2, 0.4]),
    st.integers(0, 99),
)
def test_at_most_half_of_each_answer_to_each_question_is_for_testing(groups, share, seed):
    """Where each group is one pair, the share of each is, rounded."""
    pairs = []
    for number, group in enumerate(groups):
        for kind, label in group:
            pairs.append(LabeledPair("a", "b", "q", label, kind, f"g{number}"))
    total = Counter((pair.kind, pair.label) for pair in pairs)
    testing = select.groups_for_testing(pairs, share, seed)
    assert testing == select.groups_for_testing(pairs[::-1], share, seed)
    tested = Counter((pair.kind, pair.label) for pair in pairs if pair.group in testing)
    assert bool(testing) == any(tested[kind, True] and tested[kind, False] for kind in KINDS)
    for kind, label in total:
        if total[kind, not label]:
            count = total[kind, label]
            assert tested[kind, label] <= count / 2
            if testing and len(pairs) == len(groups) and count > 1:
                assert tested[kind, label] == max(1, round(share * count))
    assert share or not testing


def test_each_kind_of_question_is_balanced_by_itself():
    """Not all together: a judge would learn that one kind is mostly Yes."""
    counted = {("theme", True): 5, ("theme", False): 2, ("pair", True): 1, ("pair", False): 4}
    pairs = []
    for (kind, label), count in counted.items():
        for number in range(count):
            pairs.append(LabeledPair(f"{label}{number}", "b", "q", label, kind, "g"))
    kept = select.balanced(pairs, 3)
    expected = dict.fromkeys([("theme", True), ("theme", False)], 2)
    expected |= dict.fromkeys([("pair", True), ("pair", False)], 1)
    assert Counter((pair.kind, pair.label) for pair in kept) == expected
    assert kept == [pair for pair in pairs if pair in kept]
    other = select.balanced(pairs, 4)
    assert set(kept) != set(other) and len(other) == len(kept)


PAIRS = [  # first, second, label, kind, and whether it is kept
    ("a", "b", True, "theme", True),
    ("b", "a2", True, "theme", False),  # again, in the other order
    ("a", "a2", True, "theme", False),  # a copy
    ("a", "c", True, "theme", False),
    ("c2", "a", False, "theme", False),  # contradicts the previous one
    ("a", "a2", True, "editing_consistency", True),
    ("a2", "a", True, "editing_consistency", False),  # again
    ("d", "e", True, "pair", True),
    ("e", "d", True, "pair", True),  # a user's may be shown in both orders
    ("d", "e", True, "pair", False),
    ("d", "f", True, "pair", False),
    ("f", "d", False, "pair", False),  # contradicts the previous one
    ("d", "f", True, "own_question", True),
    ("f", "d", False, "own_question", True),  # it may be about the order
]


def test_repeated_and_disputed_pairs_are_left_out():
    pairs = []
    expected = []
    for first, second, label, kind, is_kept in PAIRS:
        pairs.append(LabeledPair(first, second, "q", label, kind, "g"))
        expected += pairs[-1:] * is_kept
    counts = Counter()
    leader = {name: name for name in "abcdef"} | {"a2": "a", "c2": "c"}
    assert select.without_duplicates(pairs, leader, counts) == expected
    assert counts == {"repeated": 3, "near_duplicate": 1, "repeated_disputed": 4}


@pytest.mark.parametrize(
    ("answer", "says_yes", "reasons"),
    [
        ("**No**, the hair\n differs in colour.", False, "The hair differs in colour."),
        ("**Yes** both show it.", True, "Both show it."),
        ('"yes" - the same fox in both.', True, "The same fox in both."),
        ("NO: “Luna” is missing", False, "“Luna” is missing"),
        ("Yes both are red", True, "Both are red"),
        ("No they differ in color", False, "They differ in color"),
        ("No other hat is shown.", None, "No other hat is shown."),
        ("> _NO_: the hat is missing here.", False, "The hat is missing here."),
        ("No.", False, ""),
        ("No difference can be seen.", None, "No difference can be seen."),
        ("no-one is the same in the two.", None, "No-one is the same in the two."),
        ("Yesterday both were the same.", None, "Yesterday both were the same."),
    ],
)
def test_verdict_and_reasons_of_a_written_answer(answer, says_yes, reasons):
    assert split_verdict(answer) == (says_yes, reasons)
