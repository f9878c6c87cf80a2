"""jpeg rewards against the size of a file on disk."""

import numpy as np
import pytest
from PIL import Image

from paco_grpo.rewards.jpeg import jpeg_compressibility, jpeg_incompressibility
from paco_grpo.types import Item

RNG = np.random.default_rng(0)
NOISE = Image.fromarray(RNG.integers(0, 255, (64, 64, 3), dtype=np.uint8))
FLAT = Image.new("RGB", (64, 64), "gray")
ITEMS = [Item(0, ""), Item(1, "")]


def test_against_the_file(tmp_path):
    scores = jpeg_incompressibility()([NOISE, FLAT], ITEMS)
    for image, score in zip((NOISE, FLAT), scores, strict=True):
        image.save(tmp_path / "x.jpg", quality=95)
        assert score == pytest.approx((tmp_path / "x.jpg").stat().st_size / 1000 / 500)
    assert scores[0] > scores[1]
    assert np.array_equal(jpeg_compressibility()([NOISE, FLAT], ITEMS), -scores)


def test_quality_counts():
    assert jpeg_incompressibility(quality=20)([NOISE], ITEMS[:1]) < jpeg_incompressibility()([NOISE], ITEMS[:1])
