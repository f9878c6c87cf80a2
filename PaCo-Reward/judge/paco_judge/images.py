"""Images for the judge: each is hashed once and encoded once per batch."""

import asyncio
import base64
import hashlib
import io
from functools import partial

from PIL import Image

# Larger images are worth a thread (hashing and zlib release the GIL).
_INLINE_PIXELS = 160 * 160


class UnreadableImage(Exception):
    """An image that cannot be decoded; the message names it and the cause."""


def encode(image: Image.Image, image_format: str = "png") -> bytes:
    """The file of an image, as RGB: lossless ``png``, or ``jpeg`` with Pillow's default quality. Raises UnreadableImage."""
    buffer = io.BytesIO()
    # Level 1: loopback bandwidth costs less than the processor time of a smaller file.
    _as_rgb(image).save(
        buffer, **{"png": {"format": "PNG", "compress_level": 1}, "jpeg": {"format": "JPEG"}}[image_format]
    )
    return buffer.getvalue()


def data_url(image: Image.Image, image_format: str = "png") -> str:
    """``data:image/png;base64,…`` of an image. Raises UnreadableImage."""
    return f"data:image/{image_format};base64," + base64.b64encode(encode(image, image_format)).decode("ascii")


def as_received(image: Image.Image, image_format: str) -> Image.Image:
    """The RGB image that a server decodes, for judges in this process. Raises UnreadableImage."""
    return _as_rgb(image) if image_format == "png" else Image.open(io.BytesIO(encode(image, image_format)))


def content_digest(image: Image.Image) -> bytes:
    """A 20-byte hash of size and RGB pixels: equal for equal content. Raises UnreadableImage."""
    image = _as_rgb(image)
    return hashlib.blake2b(image.tobytes(), digest_size=20, salt=b"%dx%d" % image.size).digest()


class ImageStore:
    """The images of one batch, hashed once per object and encoded once per content. Used on one event loop."""

    def __init__(self, image_format: str = "png"):
        self._format = image_format
        self._digests: dict[int, asyncio.Future] = {}
        self._images: dict[bytes, Image.Image] = {}
        self._urls: dict[bytes, asyncio.Future] = {}

    async def digest(self, image: Image.Image) -> bytes:
        """Content hash of an image that the caller keeps alive. Raises UnreadableImage."""
        future = self._digests.get(id(image))
        if future is None:
            future = self._digests[id(image)] = asyncio.ensure_future(_off_loop(content_digest, image))
        digest = await future
        self._images.setdefault(digest, image)
        return digest

    async def url(self, digest: bytes) -> str:
        """Data URL of an image whose digest was taken."""
        future = self._urls.get(digest)
        if future is None:
            future = self._urls[digest] = asyncio.ensure_future(
                _off_loop(partial(data_url, image_format=self._format), self._images[digest])
            )
        return await future


async def _off_loop(function, image: Image.Image):
    if not isinstance(image, Image.Image):
        raise UnreadableImage(f"a pair needs two PIL images, got {type(image).__name__}")
    if image.width * image.height <= _INLINE_PIXELS:
        return function(image)
    return await asyncio.get_running_loop().run_in_executor(None, function, image)


def _as_rgb(image: Image.Image) -> Image.Image:
    try:
        image.load()
        return image if image.mode == "RGB" else image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        name = getattr(image, "filename", "") or "in memory"
        raise UnreadableImage(f"image {name} cannot be read: {error}") from error
