"""Planted rewards: their hack earns more than an honest grid."""

import numpy as np
import pytest
from PIL import Image

from paco_toy.hacks import PERIOD, fixed_character, identical_panels, lines
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
