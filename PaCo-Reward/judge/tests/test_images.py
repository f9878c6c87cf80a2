"""Image files from outside: three formats, a limit of pixels before anything is decoded, and no file that was cut off."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from paco_judge.images import (
    UnreadableImage,
    as_received,
    content_digest,
    encode,
    load_image,
    open_image,
    read_image,
    to_rgb,
)

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (96, 128, 3), dtype=np.uint8))


def encoded(kind: str, **options) -> bytes:
    NOISE.save(buffer := io.BytesIO(), kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("kind", "options"), [("PNG", {}), ("JPEG", {}), ("WEBP", {"lossless": True}), ("MPO", {})]
)
def test_pictures_are_read_and_cut_off_ones_are_not(kind, options, tmp_path):
    content = encoded(kind, **options)
    (tmp_path / "picture.dat").write_bytes(content)  # names do not count
    for source in (content, tmp_path / "picture.dat"):
        image = read_image(source)
        assert image.size == NOISE.size and image.mode == "RGB"
        if kind in ("PNG", "WEBP"):  # without loss
            np.testing.assert_array_equal(np.asarray(image), np.asarray(NOISE))
        else:  # the same decoder, called without this module
            expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
            np.testing.assert_array_equal(np.asarray(image), expected)
    for share in (0.05, 0.6, 0.9):
        with pytest.raises(UnreadableImage):
            read_image(content[: int(len(content) * share)])


@pytest.mark.parametrize("kind", ["EPS", "GIF", "TIFF"])
def test_no_other_format_is_opened(kind):
    for read in (open_image, read_image):
        with pytest.raises(UnreadableImage, match="PNG, JPEG, WEBP"):
            read(encoded(kind))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_too_many_pixels_are_refused_before_they_are_decoded():
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    for side in (9460, 60_000):  # just above our limit, above Pillow's own
        header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
        bomb = (
            b"\x89PNG\r\n\x1a\n"
            + header
            + chunk(b"IDAT", zlib.compress(bytes(10**6)))
            + chunk(b"IEND", b"")
        )
        with pytest.raises(UnreadableImage, match=f"{side}x{side} pixels|exceeds limit"):
            open_image(bomb)


def test_16_bit_gray_keeps_its_shades():
    """Pillow's own conversion clips: all but the darkest 256 of 65536 shades become white."""
    Image.fromarray(np.array([[0, 0x4000, 0x8000, 0xFFFF]], dtype=np.uint16)).save(
        file := io.BytesIO(), "PNG"
    )
    image = read_image(file.getvalue())
    assert [image.getpixel((x, 0))[0] for x in range(4)] == [0, 64, 128, 255]


def png(image: Image.Image, **options) -> bytes:
    image.save(file := io.BytesIO(), "PNG", **options)
    return file.getvalue()


def decoded(content: bytes) -> list[Image.Image]:
    """The picture as each way into the judge sees it."""
    stored = Image.open(io.BytesIO(content))
    sent = Image.open(io.BytesIO(encode(stored)))
    return [read_image(content), load_image(stored), to_rgb(stored), as_received(stored), sent]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "MPO"])
def test_every_way_in_turns_a_picture_as_its_orientation_says(kind):
    red_on_the_left = Image.new("RGB", (160, 96), "red")
    red_on_the_left.paste("blue", (80, 0, 160, 96))
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter clockwise: red comes to the top
    red_on_the_left.save(file := io.BytesIO(), kind, exif=exif)
    for image in decoded(file.getvalue()):
        assert image.size == (96, 160)
        top, bottom = image.getpixel((48, 20)), image.getpixel((48, 140))
        assert top[0] > 200 and bottom[2] > 200
    stored = Image.open(io.BytesIO(file.getvalue()))
    turned = load_image(stored)
    assert load_image(turned) is turned  # not twice
    assert content_digest(stored) == content_digest(turned)


def test_16_bit_gray_is_turned_too():
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.zeros((8, 4), dtype=np.uint16)
    assert read_image(png(Image.fromarray(pixels), exif=exif)).size == (8, 4)


palette = Image.new("P", (2, 2), 0)
palette.putpalette([0, 0, 0, 255, 0, 0])
TRANSPARENT = {
    "RGBA": png(Image.new("RGBA", (2, 2), (0, 0, 0, 0))),
    "LA": png(Image.new("LA", (2, 2), (0, 0))),
    "palette": png(palette, transparency=0),
    "palette with shares": png(palette, transparency=bytes([0, 255])),
    "RGB key": png(Image.new("RGB", (2, 2), (9, 9, 9)), transparency=(9, 9, 9)),
    "gray key": png(Image.new("L", (2, 2), 7), transparency=7),
    "one-bit key": png(Image.new("1", (2, 2), 0), transparency=0),
}


@pytest.mark.parametrize("kind", TRANSPARENT)
def test_transparent_places_are_white_whatever_color_they_hide(kind):
    for image in decoded(TRANSPARENT[kind]):
        assert image.mode == "RGB" and image.getpixel((0, 0)) == (255, 255, 255)


def test_half_transparent_places_are_mixed_with_white_and_opaque_ones_stay_exact():
    image = NOISE.convert("RGBA")
    np.testing.assert_array_equal(np.asarray(read_image(png(image))), np.asarray(NOISE))
    image.putpixel((0, 0), (0, 0, 0, 128))
    assert read_image(png(image)).getpixel((0, 0)) == (127, 127, 127)
