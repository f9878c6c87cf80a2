"""Image files from outside, and images as the judge gets them."""

import io

import numpy as np
import pytest
from PIL import Image

from paco_judge.images import (
    UnreadableImage,
    as_received,
    content_digest,
    encode,
    load_image,
    read_image,
    to_rgb,
)

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (96, 128, 3), dtype=np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    image.save(file := io.BytesIO(), kind, **options)
    return file.getvalue()


def decoded(content: bytes) -> list[Image.Image]:
    """The picture as each way into the judge sees it."""
    stored = Image.open(io.BytesIO(content))
    sent = Image.open(io.BytesIO(encode(stored)))
    return [read_image(content), load_image(stored), to_rgb(stored), as_received(stored), sent]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "MPO"])
def test_pictures_are_read_and_cut_off_ones_are_not(kind, tmp_path):
    content = encoded(NOISE, kind)
    (tmp_path / "picture.dat").write_bytes(content)  # names do not count
    expected = np.asarray(Image.open(io.BytesIO(content)))
    np.testing.assert_array_equal(np.asarray(read_image(tmp_path / "picture.dat")), expected)
    for share in (0.05, 0.9):
        with pytest.raises(UnreadableImage):
            read_image(content[: int(len(content) * share)])


@pytest.mark.parametrize("kind", ["EPS", "TIFF"])
def test_no_other_format_is_opened(kind):
    with pytest.raises(UnreadableImage, match="PNG"):
        read_image(encoded(NOISE, kind))


TURNED = Image.Exif()
TURNED[0x0112] = 6  # a quarter clockwise: what is on the left comes to the top


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "MPO"])
def test_every_way_in_turns_a_picture_as_its_orientation_says(kind):
    red_on_the_left = Image.new("RGB", (160, 96), "red")
    red_on_the_left.paste("blue", (80, 0, 160, 96))
    content = encoded(red_on_the_left, kind, exif=TURNED)
    for image in decoded(content):
        assert image.size == (96, 160)
        top, bottom = image.getpixel((48, 20)), image.getpixel((48, 140))
        assert top[0] > 200 and bottom[2] > 200
    stored = Image.open(io.BytesIO(content))
    turned = load_image(stored)
    assert load_image(turned) is turned  # not twice
    assert content_digest(stored) == content_digest(turned)
    blank = [Image.new("RGB", size) for size in (turned.size, turned.size[::-1])]
    assert len(set(map(content_digest, blank))) == 2  # the same bytes in another shape


def test_16_bit_gray_keeps_its_shades_and_is_turned():
    """Pillow's own conversion clips: all but the darkest 256 of 65536 shades become white."""
    pixels = np.array([[0, 0x4000], [0x8000, 0xFFFF]], dtype=np.uint16)
    image = read_image(encoded(Image.fromarray(pixels), exif=TURNED))
    np.testing.assert_array_equal(np.asarray(image)[..., 1], [[128, 0], [255, 64]])


palette = Image.new("P", (2, 2), 0)
palette.putpalette([0, 0, 0, 255, 0, 0])
TRANSPARENT = {
    "LA": encoded(Image.new("LA", (2, 2), (0, 0))),
    "palette with shares": encoded(palette, transparency=bytes([0, 255])),
    "RGB key": encoded(Image.new("RGB", (2, 2), (9, 9, 9)), transparency=(9, 9, 9)),
}


@pytest.mark.parametrize("kind", TRANSPARENT)
def test_transparent_places_are_white_whatever_color_they_hide(kind):
    for image in decoded(TRANSPARENT[kind]):
        assert image.mode == "RGB" and image.getpixel((0, 0)) == (255, 255, 255)
