"""Rankings become Yes/No pairs.

The rule: the best ``yes_ranks`` candidates of a ranking are consistent with its reference (Yes), the worst ``no_ranks``
are not (No); those between are left out, since people disagree on them most. A ranking by scores in which a Yes candidate
is not at least ``min_gap`` above every No candidate is left out whole. The order of the two images is drawn by the seed.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from paco_judge.questions import theme_question
from paco_reward.pairing.records import LabelledPair, PromptItem, Ranking
from paco_reward.pairing.seeding import order_key


def labels_of_ranking(
    ranking: Ranking, yes_ranks: int, no_ranks: int, min_gap: float = 0.0
) -> list[tuple[str, bool]] | None:
    """The rule above: (candidate, label) of the candidates that get one, best first.

    Returns:
        None where the ranking is too short (fewer than ``yes_ranks + no_ranks`` candidates) or its scores are too near.
    """
    names = ranking.rank_images
    if len(names) < yes_ranks + no_ranks:
        return None
    if ranking.scores is not None and ranking.scores[yes_ranks - 1] - ranking.scores[-no_ranks] < min_gap:
        return None
    return [(name, True) for name in names[:yes_ranks]] + [(name, False) for name in names[-no_ranks:]]


def pairs_of_rankings(
    rankings: Sequence[Ranking],
    items: Mapping[str, PromptItem],
    *,
    yes_ranks: int,
    no_ranks: int,
    min_gap: float,
    seed: int,
    counts: Counter,
) -> list[LabelledPair]:
    """The pairs of all rankings, each two images once.

    Two images that rankings disagree on get the label of the majority; none where the votes are equal. ``counts``
    receives ``rankings_unclear`` (left out by the rule), ``rankings_used``, ``pairs_merged`` (the same two images again)
    and ``pairs_disputed`` (equal votes).
    """
    votes: dict[tuple[str, str, str], list[bool]] = {}
    for ranking in rankings:
        labelled = labels_of_ranking(ranking, yes_ranks, no_ranks, min_gap)
        counts["rankings_unclear" if labelled is None else "rankings_used"] += 1
        for name, label in labelled or []:
            first, second = sorted((ranking.ref_image, name))
            votes.setdefault((ranking.folder, first, second), []).append(label)
    pairs = []
    for (folder, first, second), labels in sorted(votes.items()):
        yes, no = labels.count(True), labels.count(False)
        counts["pairs_merged"] += len(labels) - 1
        if yes == no:
            counts["pairs_disputed"] += 1
            continue
        item = items[folder]
        shown = [f"images/{folder}/{first}", f"images/{folder}/{second}"]
        if order_key(seed, *shown)[0] % 2:
            shown.reverse()
        pairs.append(LabelledPair(*shown, theme_question(item.theme), yes > no, "theme", item.group))
    return pairs


def with_reason(pair: LabelledPair, reason: str) -> LabelledPair:
    """The pair with a whole answer, which begins with its label."""
    return replace(pair, reason=reason)
