"""Image files from outside: three formats, a limit of pixels before anything is decoded, and no file that was cut off."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from paco_judge.images import UnreadableImage, open_image, read_image

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
        found = np.asarray(read_image(source), dtype=float)
        assert (
            found.shape == (96, 128, 3) and np.abs(found - np.asarray(NOISE)).mean() < 60
        )  # JPEG halves colors
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
