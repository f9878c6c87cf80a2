"""Automated sub-figure pairing: a reference and candidates from different generations of one prompt.

A set is made from a reference panel i of one generation, and from panel j ≠ i of the same generation and of others.
All candidates answer one panel text, so that they differ in how consistent they are with the reference and not in what
they were asked to show; i ≠ j, so that none is the reference again.
"""

from itertools import product

from paco_reward.pairing.records import CandidateSet, PromptItem
from paco_reward.pairing.seeding import generator


def candidate_sets(item: PromptItem, candidates: int, sets: int, seed: int) -> list[CandidateSet]:
    """Up to ``sets`` different sets of one prompt, chosen by the seed.

    Args:
        candidates: at most this many candidates a set (at least 2), the reference's own generation among them; fewer
            where the prompt has fewer generations.
    Returns:
        Nothing where the prompt has fewer than two generations or two panels.
    """
    generations, panels = len(item.generations), item.rows * item.cols
    if generations < 2 or panels < 2:
        return []
    rng = generator(seed, item.folder, "sets")
    places = [(g, i, j) for g, i, j in product(range(generations), range(panels), range(panels)) if i != j]
    formed = []
    for own, reference, panel in sorted(rng.sample(places, min(sets, len(places)))):
        others = [g for g in range(generations) if g != own]
        chosen = [own, *rng.sample(others, min(candidates - 1, len(others)))]
        names = tuple(item.generations[g].names[panel] for g in sorted(chosen))
        formed.append(CandidateSet(item.folder, item.generations[own].names[reference], names))
    return formed
