"""Train and test without a common theme, and as many Yes as No."""

from collections.abc import Hashable, Iterable, Sequence

from paco_reward.pairing.records import LabelledPair
from paco_reward.pairing.seeding import order_key

TRAIN, TEST = "train", "test"


def connected(keys: Sequence[Iterable[Hashable]]) -> list[int]:
    """Group number of each entry; entries that share a key, directly or over others, are in one group.

    Numbers are those of the group's first entry.
    """
    parent = list(range(len(keys)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    owner: dict[Hashable, int] = {}
    for index, own in enumerate(keys):
        for key in own:
            a, b = root(owner.setdefault(key, index)), root(index)
            parent[max(a, b)] = min(a, b)
    return [root(index) for index in range(len(keys))]


def test_groups(groups: Iterable[str], share: float, seed: int) -> set[str]:
    """The groups of the test split: ``share`` in [0, 1) of them, rounded.

    At least one is for testing and one for training, where there are two and share is above 0.
    """
    known = sorted(set(groups), key=lambda group: order_key(seed, "split", group))
    if share <= 0 or len(known) < 2:
        return set()
    return set(known[: min(max(1, round(share * len(known))), len(known) - 1)])


def balanced(pairs: Sequence[LabelledPair], seed: int) -> list[LabelledPair]:
    """As many Yes as No of each kind of question; pairs of the larger label are left out by the seed. Order is kept."""
    kept: set[int] = set()
    for kind in {pair.kind for pair in pairs}:
        sides = [
            sorted(
                (index for index, pair in enumerate(pairs) if pair.kind == kind and pair.label == label),
                key=lambda index: _key(pairs[index], seed),
            )
            for label in (True, False)
        ]
        count = min(len(side) for side in sides)
        kept.update(index for side in sides for index in side[:count])
    return [pair for index, pair in enumerate(pairs) if index in kept]


def shuffled(pairs: Sequence[LabelledPair], seed: int) -> list[LabelledPair]:
    """The pairs in an order drawn by the seed."""
    return sorted(pairs, key=lambda pair: _key(pair, seed))


def _key(pair: LabelledPair, seed: int) -> bytes:
    return order_key(seed, pair.kind, pair.first, pair.second, pair.question)
