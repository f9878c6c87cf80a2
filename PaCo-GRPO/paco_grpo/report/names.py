"""How pages call metrics, and what they say about them."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from paco_grpo.monitoring.signs import SIGNS


class Name(NamedTuple):
    """How the page calls a metric, and what it says about it."""

    label: str
    meaning: str


# Other rewards are called by their own names.
REWARDS = {
    "consistency_score": Name(
        "judge: consistency",
        "The judge's probability that two panels of an image are consistent, mean over the pairs.",
    ),
    "between_images": Name(
        "judge: images differ",
        "1 − the judge's probability that panels of two images of one prompt are consistent. High "
        "while the images of a prompt differ; 1 for prompts that leave nothing open.",
    ),
    "consistency_for_editing": Name(
        "judge: edit",
        "The judge's probabilities that the instruction was followed and that the rest was kept: "
        "the root of their product.",
    ),
    "win_rate": Name(
        "judge: win rate",
        "The judge's probability that an image is better than others of its prompt.",
    ),
    "votes": Name(
        "a person's votes",
        "What people answered on the run's page: 1 for what they like, or the best of a group, 0 "
        "for what they do not, or the worst.",
    ),
}
HEALTH = {
    "reward/within_minus_between": Name(
        "w − b",
        "How much more panels of one image agree than panels of different images of an open "
        "prompt, by the judge. It rises with consistency and falls when all images become the "
        "same.",
    ),
    "health/diversity_vs_first": Name(
        "diversity",
        "1 − b, how much images of an open prompt differ for the judge: means of three epochs, "
        "relative to the first three.",
    ),
    "health/distinctness_vs_first": Name(
        "images of a prompt differ",
        "In their pixels: means of three epochs, relative to the first three.",
    ),
    "health/velocity_change": Name(
        "distance to the base model",
        "Relative change of the predicted velocity on fixed prompts.",
    ),
    "health/latent_std_vs_first": Name(
        "spread of latents", "Means of three epochs, relative to the first epoch."
    ),
    "train/grad_norm": Name(
        "gradient norm", "Before clipping. A steady rise means that the learning rate is too high."
    ),
    "train/ratio_mean": Name(
        "mean ratio", "New to old probability of the samples. It should stay near 1."
    ),
    "train/clip_share": Name(
        "share of clipped samples", "These samples no longer change the weights."
    ),
    "advantage/zero_std_share": Name(
        "groups without spread", "All their images have the same score, so they teach nothing."
    ),
}


def reward_name(reward: str, more: Mapping[str, Name]) -> Name:
    """Of any reward, which may follow the name of its prompt set: ``SET/REWARD``."""
    name_of_set, _, name = reward.rpartition("/")
    known = (REWARDS | dict(more)).get(name, Name(name.replace("_", " "), ""))
    return known._replace(label=f"{known.label} · {name_of_set}") if name_of_set else known


def limits_of(metric: str) -> list[float]:
    """Beyond which a run warns."""
    limits = []
    for sign in SIGNS:
        if sign.metric == metric:
            limits += [limit for limit in (sign.lowest, sign.highest) if math.isfinite(limit)]
    return limits
