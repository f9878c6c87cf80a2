"""Opening images."""

from pathlib import Path

from PIL import Image

from paco_judge.images import UnreadableImage, read_image
from paco_reward.errors import PacoRewardError

LARGEST_DOWNLOAD = 64 * 2**20  # bytes
_DOWNLOAD_TIMEOUT_S = 30.0


def open_image(source: str | Path | Image.Image) -> Image.Image:
    """An RGB image from a file, an http(s) URL or another image.

    Raises:
        PacoRewardError: It is missing, cannot be downloaded, or is not a PNG, JPEG or WebP image of a usual size.
    """
    if isinstance(source, Image.Image):
        return source.convert("RGB")
    is_url = str(source).startswith(("http://", "https://"))
    try:
        return read_image(_download(str(source)) if is_url else source)
    except UnreadableImage as error:
        raise PacoRewardError(f"image {source} {error}") from error


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
