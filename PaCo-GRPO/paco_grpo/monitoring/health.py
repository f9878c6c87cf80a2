"""Detects collapse: what is measured every epoch, and rules over the rows of metrics.jsonl.

A resumed run judges as if it had never stopped.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from paco_grpo.distributed import gather_rows
from paco_grpo.monitoring.metrics import means, rewards_line
from paco_grpo.options import RunOptions
from paco_grpo.policies.base import Policy
from paco_grpo.policies.lora import reference_weights
from paco_grpo.sampling.denoise import integrate
from paco_grpo.sampling.images import at_size
from paco_grpo.types import Conditioning, Item, Stream

_THUMBNAIL = 16  # pixels a side, enough to tell pictures apart
_TREND = 3  # epochs at start and end whose mean diversity is compared
_DIVERGENCE = 3.0  # standard errors by which a trained reward rises and another one falls

Row = Mapping[str, Any]


# --- measurements ---------------------------------------------------------------------------------


class SampleObserver:
    """Collects statistics of one process's samples while they are drawn, and keeps no image."""

    def __init__(self) -> None:
        self._rows: dict[int, np.ndarray] = {}

    def add(self, images: Sequence[Image.Image | None], numbers: Sequence[int]) -> None:
        """Take in the images of the samples ``numbers``; None: it is not finite."""
        for number, image in zip(numbers, images, strict=True):
            self._rows[number] = np.full(3 * _THUMBNAIL**2, math.nan)
            if image is not None:
                small = image.convert("RGB").resize((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BOX)
                self._rows[number] = np.asarray(small, dtype=np.float64).ravel() / 255

    def metrics(
        self, clean_latents: Sequence[torch.Tensor], item_ids: np.ndarray
    ) -> dict[str, float]:
        """The spread of latents and images over all processes; a collective operation.

        Args:
            clean_latents: (1, L, C), of each of this process's samples.
            item_ids: (N,), of all samples, by position.

        Returns:
            ``health/finite_share``, the share of finite images. The others are over these:
            ``health/latent_std``, NaN if there are none, and ``health/distinctness``, the standard
            deviation of a pixel over the images of a prompt, if a prompt has two.
        """
        spread = [float(x.float().std(unbiased=False)) for x in clean_latents]
        images = [self._rows[number] for number in range(len(spread))]
        everyone = gather_rows(np.column_stack([spread, images]))
        is_finite = np.isfinite(everyone).all(axis=1)
        metrics = {"health/finite_share": float(is_finite.mean()), "health/latent_std": math.nan}
        if is_finite.any():
            metrics["health/latent_std"] = float(everyone[is_finite, 0].mean())
        variances = []
        for item in np.unique(item_ids):
            group = everyone[is_finite & (item_ids == item), 1:]
            if len(group) > 1:
                variances.append(group.var(axis=0).mean())
        if variances:
            metrics["health/distinctness"] = math.sqrt(np.mean(variances))
        return metrics


class _State(NamedTuple):
    """Latents that the reference sampled for one item, and its velocity there."""

    velocity: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (latents, σ) → velocity
    latents: torch.Tensor  # (1, L, C)
    sigma: torch.Tensor  # (1,)
    reference: torch.Tensor  # (1, L, C), the reference's velocity


class ReferenceProbe:
    """How far the trained generator is from the reference, on a few test items with fixed noise.

    The reference (``lora.reference_weights``) denoises once up to the first noise step. A resumed
    run computes the same states again.
    """

    def __init__(self, policy: Policy, items: Sequence[Item], options: RunOptions) -> None:
        self.policy = policy
        self.items = list(items)
        self.options = options
        self._sized: list[Item] = []  # with their images
        self._states: list[_State] = []  # of each item

    def load(self) -> None:
        """Read the items' images, without a forward."""
        options = self.options
        for item in self.items:
            sized = at_size(item, options.train.resolution, options.item_size, self.policy)
            self._sized.append(sized)

    @torch.no_grad()
    def prepare(self) -> None:
        """Compute the reference's states and velocities, at the first call only."""
        if self._states:
            return
        if not self._sized:
            self.load()
        options = self.options
        policy = self.policy
        step = min(options.sample.noise_steps, default=min(1, options.sample.num_steps - 1))
        with reference_weights(policy):
            for number, sized in enumerate(self._sized):
                size = sized.height, sized.width
                text = policy.encode([sized], options.train.max_sequence_length)
                velocity = partial(self._velocity, text, size)
                words = np.random.SeedSequence([Stream.PROBE, options.seed, number])
                word = words.generate_state(1, np.uint64)[0]
                sigmas = policy.sigmas(options.sample.num_steps, *size)
                noise = policy.initial_latents([int(word >> np.uint64(1))], *size)
                latents = integrate(velocity, noise, sigmas[: step + 1])
                sigma = sigmas[step].to(latents.device).expand(1)
                self._states.append(_State(velocity, latents, sigma, velocity(latents, sigma)))

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """``health/velocity_change``: mean ‖v − v_ref‖/‖v_ref‖ over the probe set."""
        self.prepare()
        changes = []
        for state in self._states:
            velocity = state.velocity(state.latents, state.sigma)
            change = (velocity - state.reference).norm() / state.reference.norm()
            changes.append(float(change))
        return {"health/velocity_change": float(np.mean(changes))}

    def _velocity(
        self,
        conditioning: Conditioning,
        size: tuple[int, int],
        x: torch.Tensor,
        sigma: torch.Tensor,
    ) -> torch.Tensor:
        return self.policy.velocity(x, sigma, conditioning, *size)


# --- rules ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One sign that a run is going wrong."""

    sign: str  # a metric
    message: str
    # The generator is damaged: this stops the run with ``train.stop_on_collapse``.
    collapse: bool = False


@dataclass(frozen=True)
class Sign:
    """A metric with its limits, which were chosen on planted hacks (docs/recovery.md)."""

    metric: str
    message: str  # with the value in braces
    cause: str
    collapse: bool
    lowest: float = -math.inf
    highest: float = math.inf


_TOO_FAST = (
    "config.train.learning_rate is too high; lower it, or add a KL term with config.train.beta > 0"
)
_SIGNS = (
    Sign(
        metric="health/velocity_change",
        highest=0.75,
        message="the generator has left the reference: on the probe set its velocity differs by "
        "{:.2f} of the reference's",
        cause=_TOO_FAST,
        collapse=True,
    ),
    Sign(
        metric="health/latent_std_vs_first",
        lowest=0.5,
        highest=2,
        message="latents have {:.2f} times the spread of the first epoch",
        cause=f"{_TOO_FAST}; or broken images get a high reward; look at the last evaluation's "
        "sheet.png",
        collapse=True,
    ),
    Sign(
        metric="health/distinctness_vs_first",
        lowest=0.25,
        message="images of one prompt differ {:.2f} times as much as in the first epoch",
        cause="the reward prefers one picture; add a reward for prompt or variety, use "
        "config.train.beta > 0, or stop earlier",
        collapse=True,
    ),
    Sign(
        metric="health/diversity_vs_first",
        lowest=0.7,
        message="images of an open prompt become alike: their diversity 1 − b has fallen to "
        "{:.2f} times its value in the first epochs",
        cause="images of a prompt become the same; use between_images as a factor "
        "(docs/rewards.md)",
        collapse=False,
    ),
)


def against_first(rows: Sequence[Row]) -> dict[str, float]:
    """``health/*_vs_first`` of the last of ``rows``, all training epochs: ratios to the first.

    Diversity is 1 − b. An epoch has few open prompts, so it is averaged over three epochs.
    """
    first = rows[0]
    last = rows[-1]
    ratios = {}
    for key in ("health/latent_std", "health/distinctness"):
        if key in last and first.get(key):
            ratios[f"{key}_vs_first"] = last[key] / first[key]
    diversities = [1 - row["reward/between"] for row in rows if "reward/between" in row]
    if any(diversities[:_TREND]):
        first_mean = np.mean(diversities[:_TREND])
        ratios["health/diversity_vs_first"] = float(np.mean(diversities[-_TREND:]) / first_mean)
    return ratios


def judge_epoch(metrics: Row) -> list[Finding]:
    """Findings on a training epoch's row of metrics.jsonl."""
    findings = []
    # NaN compares false with every limit.
    not_finite = []
    for name, value in metrics.items():
        if name.startswith("health/") and not math.isfinite(value):
            not_finite.append(name)
    if not_finite:
        message = (
            f"{', '.join(not_finite)} not finite: the generator's images or velocities are NaN "
            f"or infinite. Likely cause: {_TOO_FAST}; or damaged weights or optimizer moments: "
            "resume from an earlier checkpoint"
        )
        findings.append(Finding(not_finite[0], message, collapse=True))
    for sign in _SIGNS:
        value = metrics.get(sign.metric, math.nan)
        if math.isfinite(value) and not sign.lowest <= value <= sign.highest:
            message = f"{sign.message.format(value)}. Likely cause: {sign.cause}"
            findings.append(Finding(sign.metric, message, sign.collapse))
    return findings


def judge_scores(rows: Sequence[Row]) -> list[Finding]:
    """A finding if the last of ``rows``, and no earlier one, is an epoch without an advantage.

    The images of each prompt then have equal scores, such as 0. ``rows`` are training epochs.
    """
    flat = [
        row.get("advantage/mean_abs") == 0 and row["advantage/dropped_share"] < 1 for row in rows
    ]
    if flat[-1:] != [True] or any(flat[:-1]):
        return []
    message = (
        f"the images of each prompt have equal scores (means: {rewards_line(rows[-1], 'reward/')}),"
        " so nothing could be learned from them. Look at the pictures and scores of an evaluation "
        "(sheet.png, eval_data.jsonl): does the reward suit the prompts, and does the generator "
        "reach it at all? More images, config.sample.num_images_per_prompt, differ more"
    )
    return [Finding("advantage/mean_abs", message)]


def judge_evaluation(
    rows: Sequence[Row], trained: Iterable[str], group: str = "eval/"
) -> list[Finding]:
    """Whether a ``trained`` reward rose significantly while another one fell.

    ``rows`` are evaluations; the last is compared with the first. The names of their metrics begin
    with ``group``: those of one prompt set, or of all.
    """
    trained = set(trained)
    first = means(rows[0], group)
    last = means(rows[-1], group)
    gains = {}  # in standard errors of the difference
    for name in last:
        key = f"{group}{name}_stderr"
        error = math.hypot(rows[0].get(key, math.nan), rows[-1].get(key, math.nan))
        if name in first and error > 0:
            gains[name] = (last[name] - first[name]) / error
    risen = []
    for name, gain in gains.items():
        if name in trained and gain > _DIVERGENCE:
            risen.append(name)
    if not risen:
        return []
    findings = []
    for name, gain in gains.items():
        if name not in trained and gain < -_DIVERGENCE:
            message = (
                f"since the first evaluation {', '.join(risen)} rose, but {name}, which is not "
                f"trained on, fell by {-gain:.1f} standard errors. Likely cause: the trained "
                "reward is being exploited; look at the images, give it a weight in "
                "config.train.reward_fn, or use config.train.beta > 0"
            )
            findings.append(Finding(f"{group}{name}_mean", message))
    return findings
