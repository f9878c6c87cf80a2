"""Opening image files."""

from pathlib import Path

from PIL import Image, UnidentifiedImageError

from paco_reward.errors import PacoRewardError


def open_image(path: str | Path | Image.Image) -> Image.Image:
    """An RGB image from a file (or the image itself, converted).

    Raises:
        PacoRewardError: missing or not an image; names the file.
    """
    if isinstance(path, Image.Image):
        return path.convert("RGB")
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except FileNotFoundError:
        raise PacoRewardError(f"image {path} does not exist") from None
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise PacoRewardError(f"image {path} cannot be read: {error}") from error
