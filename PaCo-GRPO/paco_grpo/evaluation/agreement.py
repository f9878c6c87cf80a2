"""w, b and w − b: panels of an image agree, images of a prompt differ (docs/rewards.md).

For a prompt with several images, ``w`` is the mean P(Yes) over pairs of panels of one image
(``consistency_score``), and ``b`` the mean P(Yes) over pairs of panels of different images of the
same *open* prompt (1 − ``between_images``). w − b is the "differential identifiability" of Amico and
Goñi (2018, arXiv:1707.02365): similarity within minus similarity between. It rises
with agreement and falls when all images become the same.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.rewards.registry import short_name

LEAST_IMAGES = 4  # of a prompt


def pairs_of(names: Iterable[str]) -> list[tuple[str, str]]:
    """The pairs of rewards among ``names`` that measure w and b.

    ``consistency_score`` belongs to ``between_images``, and ``X_consistency`` or
    ``X_consistency_score`` to ``X_between_images``.
    """
    names = set(names)
    suffix = "between_images"
    prefixes = sorted(name.removesuffix(suffix) for name in names if name.endswith(suffix))
    pairs = []
    for prefix in prefixes:
        for within in (f"{prefix}consistency_score", f"{prefix}consistency"):
            if within in names:
                pairs.append((within, f"{prefix}{suffix}"))
    return pairs


def by_prompt(scores: np.ndarray, item_ids: np.ndarray, mean: Callable = np.mean) -> np.ndarray:
    """Means of each prompt's images (prompts, rewards), prompts in order of their ids.

    Args:
        scores: (images, rewards), NaN = missing. With ``np.mean`` its prompt's mean is missing,
            too.
        item_ids: (images,)
    """
    means = [mean(scores[item_ids == item_id], axis=0) for item_id in np.unique(item_ids)]
    return np.array(means).reshape(-1, scores.shape[1])


def within_between(
    scores: np.ndarray, item_ids: np.ndarray, is_open: np.ndarray
) -> dict[str, np.ndarray]:
    """w, b and w − b of each open prompt, (prompts,) in order of their ids.

    Means over its images that have the score; NaN without any.

    Args:
        scores: (images, 2), of the rewards that measure w and 1 − b; NaN = missing.
        item_ids: (images,)
        is_open: (images,) bool
    """
    means = by_prompt(scores[is_open], item_ids[is_open], _mean_of_present)
    within = means[:, 0]
    between = 1 - means[:, 1]
    return {"within": within, "between": between, "within_minus_between": within - between}


def _mean_of_present(values: np.ndarray, axis: int) -> np.ndarray:
    """As ``np.nanmean``, but without a warning where all values are missing."""
    return np.ma.masked_invalid(values).mean(axis).filled(np.nan)


def of_epoch(
    scores: Mapping[str, np.ndarray], item_ids: np.ndarray, is_open: Sequence[bool]
) -> dict[str, float]:
    """``reward/within``, ``reward/between`` and their difference of a training epoch.

    Means over its open prompts; {} without two rewards that measure them, or without such prompts.

    Args:
        scores: Short name → (samples,), NaN = missing.
        item_ids: (samples,)
        is_open: By item id.
    """
    pairs = pairs_of(scores)
    if not pairs:
        return {}
    columns = np.column_stack([scores[name] for name in pairs[0]])
    measured = within_between(columns, item_ids, np.array(is_open)[item_ids])
    has_both = ~np.isnan(measured["within_minus_between"])
    if not has_both.any():
        return {}
    return {f"reward/{name}": float(values[has_both].mean()) for name, values in measured.items()}


def measuring(options: RunOptions, images_per_prompt: int) -> RunOptions:
    """``options`` whose test rewards are enough for w and b.

    ``between_images`` is added beside ``consistency_score``.
    """
    if images_per_prompt < LEAST_IMAGES:
        raise ConfigError(
            f"--images_per_prompt {images_per_prompt} must be at least {LEAST_IMAGES}"
        )
    if options.datasets:
        raise ConfigError(
            "--images_per_prompt measures one prompt set: add --config.datasets={} and "
            "--config.dataset=FOLDER"
        )
    test = options.test
    rewards = dict(test.reward_fn or options.train.reward_fn)
    kwargs = options.train.reward_fn_kwargs | test.reward_fn_kwargs
    if not pairs_of(map(short_name, rewards)):
        if "consistency_score" not in rewards:
            names = ", ".join(rewards)
            raise ConfigError(
                f"--images_per_prompt needs the test reward consistency_score, not only {names}"
            )
        rewards["between_images"] = 1.0
        kwargs["between_images"] = kwargs.get("consistency_score", {})
    return replace(options, test=replace(test, reward_fn=rewards, reward_fn_kwargs=kwargs))
