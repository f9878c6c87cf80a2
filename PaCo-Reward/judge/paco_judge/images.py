"""Images for the judge: each is hashed once and encoded once per batch."""

import asyncio
import base64
import hashlib
import io

from PIL import Image

# Larger images are worth a thread (hashing and zlib release the GIL).
_INLINE_PIXELS = 160 * 160


class UnreadableImage(Exception):
    """An image that cannot be decoded; the message names it and the cause."""


def png_data_url(image: Image.Image) -> str:
    """``data:image/png;base64,…`` of an image, as RGB. Raises UnreadableImage."""
    buffer = io.BytesIO()
    # Level 1: loopback bandwidth costs less than the processor time of a smaller file.
    _as_rgb(image).save(buffer, format="PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(buffer.getbuffer()).decode("ascii")


def content_digest(image: Image.Image) -> bytes:
    """A 20-byte hash of size and RGB pixels: equal for equal content. Raises UnreadableImage."""
    image = _as_rgb(image)
    return hashlib.blake2b(image.tobytes(), digest_size=20, salt=b"%dx%d" % image.size).digest()


class ImageStore:
    """The images of one batch, hashed once per object and encoded once per content. Used on one event loop."""

    def __init__(self):
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
            future = self._urls[digest] = asyncio.ensure_future(_off_loop(png_data_url, self._images[digest]))
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
