"""Opening images."""

import io
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from paco_reward.errors import PacoRewardError

LARGEST_DOWNLOAD = 64 * 2**20  # bytes
_DOWNLOAD_TIMEOUT_S = 30.0


def open_image(source: str | Path | Image.Image) -> Image.Image:
    """An RGB image from a file, an http(s) URL or another image.

    Raises:
        PacoRewardError: It is missing, cannot be downloaded, or is not an image.
    """
    if isinstance(source, Image.Image):
        return source.convert("RGB")
    is_url = str(source).startswith(("http://", "https://"))
    try:
        with Image.open(io.BytesIO(_download(str(source))) if is_url else source) as image:
            return image.convert("RGB")
    except FileNotFoundError:
        raise PacoRewardError(f"image {source} does not exist") from None
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise PacoRewardError(f"image {source} cannot be read: {error}") from error


def _download(url: str) -> bytes:
    import httpx

    content = bytearray()
    try:
        with httpx.stream("GET", url, timeout=_DOWNLOAD_TIMEOUT_S, follow_redirects=True) as response:
            response.raise_for_status()
            for chunk in response.iter_bytes():
                content += chunk
                if len(content) > LARGEST_DOWNLOAD:
                    raise PacoRewardError(
                        f"image {url} is larger than {LARGEST_DOWNLOAD >> 20} MiB; download it yourself"
                    )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PacoRewardError(f"image {url} cannot be fetched: {error}") from error
    return bytes(content)
