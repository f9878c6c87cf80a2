"""Image files from outside: three formats, a limit of pixels before anything is decoded, and no file that was cut off."""

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from paco_judge import images
from paco_judge.images import UnreadableImage, open_image, read_image

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (96, 128, 3), dtype=np.uint8))


def encoded(kind: str, image: Image.Image = NOISE, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


READABLE = {
    "PNG": encoded("PNG"),
    "JPEG": encoded("JPEG"),
    "WEBP": encoded("WEBP", lossless=True),
    "MPO": encoded(
        "MPO", save_all=True, append_images=[NOISE]
    ),  # photographs of telephones: a JPEG with more behind it
}


@pytest.mark.parametrize("kind", READABLE)
def test_the_formats_of_pictures_are_read(kind, tmp_path):
    file = tmp_path / "picture.dat"  # names do not count
    file.write_bytes(READABLE[kind])
    for source in (READABLE[kind], file, str(file)):
        found = np.asarray(read_image(source), dtype=float)
        assert (
            found.shape == (96, 128, 3) and np.abs(found - np.asarray(NOISE)).mean() < 60
        )  # JPEG halves the colors' resolution


@pytest.mark.parametrize("kind", ["EPS", "GIF", "BMP", "TIFF", "PPM", "ICO", "JPEG2000", "PCX"])
def test_no_other_format_is_opened(kind, tmp_path):
    file = tmp_path / "picture.png"
    file.write_bytes(encoded(kind))
    for source in (file, file.read_bytes()):
        for read in (open_image, read_image):
            with pytest.raises(UnreadableImage, match="PNG, JPEG, WEBP"):
                read(source)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_too_many_pixels_are_refused_before_they_are_decoded(tmp_path):
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(bytes(10**6))
    for side in (9460, 60_000):  # just above our limit, above Pillow's own
        header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
        bomb = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
        for read in (open_image, read_image):
            with pytest.raises(UnreadableImage, match=f"{side}x{side} pixels|exceeds limit"):
                read(bomb)
    assert images.MAX_PIXELS == Image.MAX_IMAGE_PIXELS


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_file_that_was_cut_off_is_unreadable(kind):
    for share in (0.05, 0.3, 0.6, 0.9):
        with pytest.raises(UnreadableImage):
            read_image(READABLE[kind][: int(len(READABLE[kind]) * share)])


def test_what_is_no_image_is_one_sentence(tmp_path):
    (tmp_path / "empty.png").touch()
    for source, said in (
        (tmp_path / "none.png", "does not exist"),
        (tmp_path, "cannot be read"),
        (tmp_path / "empty.png", "is not an image"),
        ("nul\0.png", "cannot be read"),
        (b"<svg></svg>", "is not an image"),
    ):
        with pytest.raises(UnreadableImage, match=said) as caught:
            read_image(source)
        assert "\n" not in str(caught.value) and " at 0x" not in str(caught.value)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about EXIF data
@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(READABLE)), st.data())
def test_damaged_files_are_one_kind_of_error(kind, data):
    """Any bytes changed, left out or appended: an image, or ``UnreadableImage``."""
    content = bytearray(READABLE[kind])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1) | st.integers(0, min(200, len(content) - 1)))
        content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    try:
        read_image(bytes(content), upright=True)
    except UnreadableImage as error:
        assert "\n" not in str(error)


def test_16_bit_gray_keeps_its_shades():
    """Pillow's own conversion clips: all but the darkest 256 of 65536 shades become white."""
    shades = np.array([[0, 0x4000, 0x8000, 0xFFFF]], dtype=np.uint16)
    file = io.BytesIO()
    Image.fromarray(shades).save(file, "PNG")
    image = read_image(file.getvalue())
    assert [image.getpixel((x, 0))[0] for x in range(4)] == [0, 64, 128, 255]
