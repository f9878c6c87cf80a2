"""Planted rewards: their hack earns more than an honest grid; warnings and limits are those of config.health."""

import dataclasses

import numpy as np
import pytest
from PIL import Image

from paco_grpo.monitoring.health import judge_epoch
from paco_grpo.options import HealthOptions, RunOptions
from paco_toy.hacks import PERIOD, first_warnings, fixed_character, identical_panels, lines, needed_limits
from paco_toy.world import CHARACTERS, VIEWS, assemble_grid, random_jitter, render_panel, to_uint8


def grid(characters, views, side=32):
    rng = np.random.default_rng(0)
    panels = [render_panel(CHARACTERS[c], VIEWS[v], side, random_jitter(rng)) for c, v in zip(characters, views)]
    return Image.fromarray(to_uint8(assemble_grid(panels)))


def ruled(image):
    pixels = np.array(image)
    pixels[PERIOD // 2 :: PERIOD] = 0
    return Image.fromarray(pixels)


HONEST = [grid([c] * 4, (0, 3, 6, 9)) for c in range(0, len(CHARACTERS), 5)]
BLANK = Image.new("RGB", (64, 64), "white")


@pytest.mark.parametrize(
    ("reward", "hacked", "other"),
    [
        (identical_panels(), [grid([c] * 4, (4,) * 4) for c in (0, 50)], BLANK),
        (fixed_character(7), [grid([7] * 4, (0, 3, 6, 9)), grid([7] * 4, (1,) * 4, side=64)], BLANK),
        (lines(), [ruled(image) for image in HONEST], BLANK),
    ],
    ids=["identical_panels", "fixed_character", "lines"],
)
def test_the_hack_earns_more_than_any_honest_image(reward, hacked, other):
    scores = reward(hacked, None)
    assert scores.dtype == np.float64 and scores.shape == (len(hacked),)
    assert scores.min() > max(*reward(HONEST, None), *reward([other], None)) + 0.1


RNG = np.random.default_rng(0)
NAMES = ("pixel_std_vs_first", "latent_std_vs_first", "pixel_detail_vs_first", "pixel_mean_vs_first", "distinctness_vs_first")
ROWS = [
    {"phase": "train", "epoch": epoch, "health/velocity_change": 0.05 * epoch}
    | {f"health/{name}": float(np.exp(0.1 * epoch * RNG.normal())) - (name == "pixel_mean_vs_first") for name in NAMES}
    for epoch in range(1, 9)
]


def test_needed_limits_are_the_tightest_that_do_not_warn():
    needed = needed_limits(ROWS)
    limits = dataclasses.replace(HealthOptions(), **needed)
    assert not [finding for i in range(len(ROWS)) for finding in judge_epoch(ROWS[: i + 1], limits, 1)]
    for name, value in needed.items():
        tighter = dataclasses.replace(limits, **{name: value * (0.999 if name.startswith("max_") else 1.001)})
        found = {finding.sign for i in range(len(ROWS)) for finding in judge_epoch(ROWS[: i + 1], tighter, 1)}
        assert found == {name}


def test_first_warnings_name_the_epoch_and_the_exploited_reward():
    options = RunOptions()
    train = dataclasses.replace(options.train, reward_fn={"paco_toy.hacks:lines": 1.0})
    options = dataclasses.replace(options, train=train, health=dataclasses.replace(HealthOptions(), max_velocity_change=0.22))
    evaluations = [
        {"phase": "eval", "epoch": epoch} | {f"eval/{name}_mean": 0.5 + step * epoch for name, step in {"lines": 0.1, "oracle_valid": -0.1}.items()}
        | {f"eval/{name}_stderr": 0.05 for name in ("lines", "oracle_valid")}
        for epoch in (0, 2, 4)
    ]  # fmt: skip
    rows = [row | {f"health/{name}": float(name != "pixel_mean_vs_first") for name in NAMES} for row in ROWS]
    assert first_warnings([*evaluations, *rows], options, 1) == {"max_velocity_change": 5, "max_reward_divergence": 4}
