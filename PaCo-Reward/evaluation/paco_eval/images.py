"""Images of a benchmark, wherever their bytes are."""

import io
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from paco_eval.errors import ItemError


def read_image(source: str | Path | bytes, name: str) -> Image.Image:
    """An RGB image from a file or from a file's bytes.

    Args:
        source: path, or the encoded bytes.
        name: what messages call it.

    Raises:
        ItemError: missing, or not an image that can be decoded.
    """
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return image.convert("RGB")
    except FileNotFoundError:
        raise ItemError(f"image {name} does not exist") from None
    except UnidentifiedImageError:
        raise ItemError(f"image {name} cannot be read: it is no image in a known format") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ItemError(f"image {name} cannot be read: {error}") from error
