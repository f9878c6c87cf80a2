"""The selection rules: candidate sets, labels from rankings, near-duplicates, splits, balance.

Random choices depend on the seed and on the chosen thing only, not on other inputs or on the order
of the work.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import imagehash
import numpy as np
from PIL import Image
from scipy.cluster.hierarchy import DisjointSet

from paco_judge.images import load_image
from paco_reward.pairing.inputs import CandidateSet, PromptItem, Ranking

THUMBNAIL = 16
LARGEST_RMS = 6.0


@dataclass(frozen=True)
class LabeledPair:
    """Two images, the question about them and its answer."""

    first: str  # path relative to the data set's folder
    second: str
    question: str
    label: bool
    # theme, editing_consistency, editing_instruction, editing; of a user: pair, own_question
    kind: str
    group: str = ""  # the unit of the split; if it is empty, its images decide: ``with_groups``
    reason: str | None = None  # the whole answer, beginning with Yes or No, once it is written

    @property
    def verdict(self) -> str:
        """The answer's first word."""
        return "Yes" if self.label else "No"


def order_key(seed: int, *parts: object) -> bytes:
    """Sort key of a seeded shuffle, the same on every machine."""
    text = "\x1f".join(str(part) for part in (seed, *parts))
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()


def candidate_sets(item: PromptItem, candidates: int, sets: int, seed: int) -> list[CandidateSet]:
    """Up to ``sets`` sets of one prompt, each of up to ``candidates``.

    The reference is panel i of one generation. The candidates are panel j ≠ i of the same
    generation and of others. They answer one panel text, so they differ in how consistent they are
    with the reference, not in content. There are none with fewer than two generations or panels.
    """
    generations = range(len(item.generations))
    panels = range(len(item.grid.panels))
    if len(generations) < 2:
        return []
    rng = random.Random(order_key(seed, item.folder, "sets"))
    places = [place for place in product(generations, panels, panels) if place[1] != place[2]]
    formed = []
    for generation, reference, panel in sorted(rng.sample(places, min(sets, len(places)))):
        others = [other for other in generations if other != generation]
        chosen = [generation, *rng.sample(others, min(candidates - 1, len(others)))]
        ref_image = item.generations[generation][reference]
        names = [item.generations[number][panel] for number in sorted(chosen)]
        formed.append(CandidateSet(folder=item.folder, ref_image=ref_image, comp_images=names))
    return formed


def labels_of_ranking(
    ranking: Ranking, yes_ranks: int, no_ranks: int, min_gap: float
) -> list[tuple[str, bool]] | None:
    """(candidate, label): Yes for the best ``yes_ranks``, No for the worst ``no_ranks``.

    Of equal ones all have the label or none. None if the ranking is too short, or if its scores for
    Yes and No differ by less than ``min_gap``.
    """
    names = ranking.rank_images
    scores = ranking.scores
    if len(names) < yes_ranks + no_ranks:
        return None
    if scores and scores[yes_ranks - 1] - scores[-no_ranks] < min_gap:
        return None
    best = names[:yes_ranks]
    worst = names[-no_ranks:]
    divided = set()
    for equal in ranking.equal:
        if not (set(equal) <= set(best) or set(equal) <= set(worst)):
            divided |= set(equal)
    labels = [(name, True) for name in best] + [(name, False) for name in worst]
    return [(name, label) for name, label in labels if name not in divided]


def pairs_of_rankings(
    rankings: Iterable[tuple[Ranking, list[tuple[str, bool]] | None]],
    groups: Mapping[str, str],
    questions: Mapping[str, str],
    seed: int,
    counts: Counter,
) -> list[LabeledPair]:
    """The labeled pairs of rankings with their ``labels_of_ranking``.

    ``groups`` and ``questions`` are those of each prompt.
    The seed chooses the order of the two images.
    Each pair comes once: where rankings disagree the majority decides, and a tie leaves it out
    (``pairs_disputed``).
    """
    votes: dict[tuple[str, str, str], list[bool]] = {}
    for ranking, labeled in rankings:
        counts["rankings_unclear" if labeled is None else "rankings_used"] += 1
        for name, label in labeled or []:
            first, second = sorted((ranking.ref_image, name))
            votes.setdefault((ranking.folder, first, second), []).append(label)
    pairs = []
    for (folder, first, second), labels in sorted(votes.items()):
        yes = labels.count(True)
        no = labels.count(False)
        if yes == no:
            counts["pairs_disputed"] += 1
            continue
        shown = [f"images/{folder}/{first}", f"images/{folder}/{second}"]
        if order_key(seed, *shown)[0] % 2:
            shown.reverse()
        pairs.append(LabeledPair(*shown, questions[folder], yes > no, "theme", groups[folder]))
    return pairs


def leaders(names: Iterable[str], root: Path, bits: int) -> dict[str, str]:
    """For each image in ``root`` the first by name that it is a near-duplicate of, or itself.

    Near-duplicates have perceptual hashes that differ in at most ``bits`` of 64 bits, and 16 x 16
    thumbnails within 6/255 root-mean-square: the hash ignores color.
    """
    ordered = sorted(set(names))
    hashes = np.empty((len(ordered), 64), dtype=bool)
    firsts: list[tuple[str, np.ndarray]] = []
    leader: dict[str, str] = {}
    for name in ordered:
        image = load_image(root / name)
        image_hash = imagehash.phash(image).hash.ravel()
        small = image.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)
        thumbnail = np.asarray(small, dtype=np.float32)
        leader[name] = name
        for number in np.flatnonzero((hashes[: len(firsts)] != image_hash).sum(1) <= bits):
            first, first_thumbnail = firsts[number]
            if np.sqrt(np.mean((first_thumbnail - thumbnail) ** 2)) <= LARGEST_RMS:
                leader[name] = first
                break
        else:
            hashes[len(firsts)] = image_hash
            firsts.append((name, thumbnail))
    return leader


def without_duplicates(
    pairs: Sequence[LabeledPair], leader: Mapping[str, str], counts: Counter
) -> list[LabeledPair]:
    """The pairs without near-duplicates; order is kept.

    A theme pair of two near-duplicates is left out: a copy says nothing about consistency. An
    editing pair of two is kept: an edit may be small. A pair that repeats an earlier one is left
    out; with another label, both are. Theme pairs are compared regardless of image order and theme,
    because a theme's split ignores the images of others. A user's are compared regardless of order:
    both orders may be kept, but not with different labels. Of edits the order counts: the reverse
    of one does not follow its instruction.
    """
    groups: dict[tuple, list[LabeledPair]] = {}
    for pair in pairs:
        shown = (leader[pair.first], leader[pair.second])
        if pair.kind == "theme" and shown[0] == shown[1]:
            counts["near_duplicate"] += 1
            continue
        key = (pair.kind, *shown, pair.question)
        if pair.kind == "theme":
            key = (pair.kind, *sorted(shown))
        elif pair.kind == "pair":
            key = (pair.kind, *sorted(shown), pair.question)
        groups.setdefault(key, []).append(pair)
    kept = []
    for same in groups.values():
        if len({pair.label for pair in same}) > 1:
            counts["repeated_disputed"] += len(same)
            continue
        different: dict[tuple[str, ...], LabeledPair] = {}
        for pair in same:
            order = (pair.first, pair.second) if pair.kind == "pair" else ()
            different.setdefault(order, pair)
        counts["repeated"] += len(same) - len(different)
        kept += different.values()
    return kept


def with_groups(pairs: Sequence[LabeledPair], leader: Mapping[str, str]) -> list[LabeledPair]:
    """The pairs, each with a group: its own, or one for all that share an image.

    Near-duplicates count as one image. Pairs of themes have groups of their own: images that many
    themes have, such as blank panels, would make one group of all.
    """
    images = DisjointSet(leader.values())
    for pair in pairs:
        images.merge(leader[pair.first], leader[pair.second])
    groups: dict[str, str] = {}
    grouped = []
    for pair in pairs:
        of_images = groups.setdefault(images[leader[pair.first]], pair.first)
        grouped.append(replace(pair, group=pair.group or of_images))
    return grouped


def groups_for_testing(pairs: Sequence[LabeledPair], share: float, seed: int) -> set[str]:
    """Groups for testing: ``share`` of those with a Yes, and with a No, of each kind of question.

    The numbers are rounded; unless the share is 0, they are at least 1. At most half of the pairs
    with one label of a kind are for testing, or ``share`` of them if that is more: a large group
    stays in training. If no kind has a Yes and a No for testing then, the set is empty.
    """
    total = Counter((pair.kind, pair.label) for pair in pairs)
    # A kind with one label will be dropped, as it cannot be balanced.
    counted = [(kind, label) for kind, label in total if (kind, not label) in total]
    sizes: dict[str, Counter[tuple[str, bool]]] = {}
    for pair in pairs:
        sizes.setdefault(pair.group, Counter())[pair.kind, pair.label] += 1
    num_groups: Counter[tuple[str, bool]] = Counter()
    for group in sizes.values():
        num_groups.update(group.keys())
    largest_share = max(0.5, share)
    num_taken: Counter[tuple[str, bool]] = Counter()
    taken: Counter[tuple[str, bool]] = Counter()  # pairs
    testing: set[str] = set()
    for group in sorted(sizes, key=lambda group: order_key(seed, "split", group)):
        after = taken + sizes[group]
        is_needed = False
        leaves_enough = True
        for key in counted:
            fewest = max(1, round(share * num_groups[key]))
            if sizes[group][key] and num_taken[key] < fewest:
                is_needed = True
            if after[key] > largest_share * total[key]:
                leaves_enough = False
        if is_needed and leaves_enough:
            testing.add(group)
            num_taken.update(sizes[group].keys())
            taken = after
    is_balanced = any(taken[kind, True] and taken[kind, False] for kind, _ in counted)
    return testing if share > 0 and is_balanced else set()


def balanced(pairs: Sequence[LabeledPair], seed: int) -> list[LabeledPair]:
    """As many Yes as No of each kind of question, chosen by the seed; order is kept."""
    # So many of each side may be kept.
    left = Counter((pair.kind, not pair.label) for pair in pairs)
    kept = set()
    for pair in shuffled(pairs, seed):
        if left[pair.kind, pair.label]:
            left[pair.kind, pair.label] -= 1
            kept.add(pair)
    return [pair for pair in pairs if pair in kept]


def shuffled(pairs: Sequence[LabeledPair], seed: int) -> list[LabeledPair]:
    """The pairs in an order that depends on the seed and on each pair alone."""
    return sorted(
        pairs, key=lambda pair: order_key(seed, pair.kind, pair.first, pair.second, pair.question)
    )
