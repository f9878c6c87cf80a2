"""Images that a reward service receives."""

import io

import numpy as np
from PIL import Image

from paco_grpo.images import decode, open_image


def test_16_bit_gray_is_scaled_to_8_bits():
    shades = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    buffer = io.BytesIO()
    Image.fromarray(shades).save(buffer, format="PNG")
    decoded = np.asarray(decode(open_image(buffer.getvalue())))
    assert decoded.shape == (8, 8, 3)
    assert np.array_equal(decoded[..., 0], shades >> 8)
