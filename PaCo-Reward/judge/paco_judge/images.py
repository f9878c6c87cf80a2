"""Image files from outside, and images as the judge gets them."""

import base64
import hashlib
import io
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageOps

# Other formats run programs (EPS: Ghostscript) or decoders that are rarely tested.
FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 89_478_485  # of one image: where Pillow begins to warn; 268 MB as RGB

_DOWNLOAD_TIMEOUT_S = 30.0
# Level 1: loopback bandwidth costs less than the processor time of a smaller file. Pillow releases
# the interpreter's lock while it compresses a PNG, so that threads encode side by side.
_SAVE = {
    "png": {"format": "PNG", "compress_level": 1},
    "jpeg": {"format": "JPEG"},
}


class UnreadableImage(ValueError):
    """An image that cannot be decoded."""


def read_image(source: str | Path | bytes | BinaryIO) -> Image.Image:
    """An image of ``FORMATS`` from a file or a file's content, as ``to_rgb`` makes it.

    Raises UnreadableImage.
    """
    return _open(source, to_rgb)


def check_header(source: str | Path | bytes | BinaryIO) -> None:
    """Raise UnreadableImage if a file does not begin as an image does."""
    _open(source, lambda image: image)


def _open(
    source: str | Path | bytes | BinaryIO, read: Callable[[Image.Image], Image.Image]
) -> Image.Image:
    content = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        with Image.open(content, formats=FORMATS) as image:  # only the header is read
            if image.width * image.height <= MAX_PIXELS:
                return read(image)
    except Image.UnidentifiedImageError as error:
        raise UnreadableImage(f"is none of {', '.join(FORMATS)}; convert it to PNG") from error
    except Exception as error:  # decoders raise many types on damaged files
        raise UnreadableImage(f"cannot be read: {error}") from error
    raise UnreadableImage(
        f"has {image.width}x{image.height} pixels, more than {MAX_PIXELS}; make it smaller"
    )


def load_image(source: str | Path | Image.Image) -> Image.Image:
    """The RGB image in a file, at an http(s) URL, or of another image.

    Raises UnreadableImage, naming the source.
    """
    if isinstance(source, Image.Image):
        return as_received(source)
    content: str | Path | bytes = source
    try:
        if str(source).startswith(("http://", "https://")):
            with urllib.request.urlopen(str(source), timeout=_DOWNLOAD_TIMEOUT_S) as response:
                content = response.read()
        return read_image(content)
    except UnreadableImage as error:
        raise UnreadableImage(f"image {source} {error}") from error
    except (OSError, ValueError) as error:
        raise UnreadableImage(f"image {source} cannot be fetched: {error}") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """The picture that a person sees: turned as its EXIF data say, on white where transparent, RGB.

    All images pass through here, from files as from memory, so that the judge, rewards and training
    see the same. An image that has passed is not changed again.
    """
    image.load()
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:  # else it would be a copy
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16-bit gray, of which Pillow would make nearly all white
        pixels = np.clip(np.asarray(image, dtype=np.int64), 0, 65535)
        image = Image.fromarray((pixels >> 8).astype(np.uint8))
    if image.has_transparency_data:
        colors = image.convert("RGBA")
        white = Image.new("RGBA", colors.size, "white")
        return Image.alpha_composite(white, colors).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def encode(image: Image.Image, image_format: str = "png") -> bytes:
    """The file of an image, as RGB: ``png``, or ``jpeg`` with Pillow's default quality.

    Raises UnreadableImage.
    """
    buffer = io.BytesIO()
    as_received(image).save(buffer, **_SAVE[image_format])
    return buffer.getvalue()


def data_url(image: Image.Image, image_format: str = "png") -> str:
    """``data:image/png;base64,…`` of an image. Raises UnreadableImage."""
    content = base64.b64encode(encode(image, image_format)).decode("ascii")
    return f"data:image/{image_format};base64,{content}"


def as_received(image: Image.Image, image_format: str = "png") -> Image.Image:
    """The RGB image that a server decodes. Raises UnreadableImage."""
    if image_format != "png":
        return Image.open(io.BytesIO(encode(image, image_format)))
    try:
        return to_rgb(image)
    except Exception as error:  # decoders raise many types on damaged data
        name = getattr(image, "filename", "") or "in memory"
        raise UnreadableImage(f"image {name} cannot be read: {error}") from error


def content_digest(image: Image.Image) -> bytes:
    """A 20-byte hash of size and RGB pixels. Raises UnreadableImage."""
    image = as_received(image)
    return hashlib.blake2b(image.tobytes(), digest_size=20, salt=b"%dx%d" % image.size).digest()
