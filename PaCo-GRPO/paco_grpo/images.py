"""Images from outside, in servers: three formats, and sizes that are checked before anything is decoded."""

import io

from PIL import Image, UnidentifiedImageError

from paco_judge.images import to_rgb

FORMATS = ("PNG", "JPEG", "WEBP")  # others run programs (EPS: Ghostscript) or decoders that are seldom tested
MAX_PIXELS = 1 << 25  # of one image, 100 MB as RGB
MAX_REQUEST_PIXELS = 1 << 27  # of all images of a request: 16 of 2048x2048 and as many references


def open_image(content: bytes, formats: tuple[str, ...] = FORMATS) -> Image.Image:
    """Reads an image's header only; ``decode`` reads the rest.

    Raises:
        ValueError: Not an image of ``formats``, or one of too many pixels.
    """
    try:
        image = Image.open(io.BytesIO(content), formats=formats)
    except (UnidentifiedImageError, Image.DecompressionBombError) as error:
        kind = ", ".join(formats)
        why = "has too many pixels" if isinstance(error, Image.DecompressionBombError) else f"is not a readable {kind}"
        raise ValueError(f"an image {why}") from error  # Pillow's own message shows an address in memory
    except Exception as error:  # decoders raise many types on damaged headers
        raise ValueError(f"an image cannot be read: {type(error).__name__}") from error
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"an image has {image.width}x{image.height} pixels; at most {MAX_PIXELS}")
    return image


def check_total(images: list[Image.Image]) -> None:
    """Raises ValueError when the images of a request have too many pixels together."""
    pixels = sum(image.width * image.height for image in images)
    if pixels > MAX_REQUEST_PIXELS:
        raise ValueError(f"the images of a request have {pixels} pixels together; at most {MAX_REQUEST_PIXELS}")


def decode(image: Image.Image) -> Image.Image:
    """An opened image as RGB. Raises ValueError."""
    try:
        return to_rgb(image)
    except Exception as error:
        raise ValueError(f"an image cannot be read: {error}") from error
