"""Identity in editing: face_likeness and kept_pixels. Look at both.

An unchanged copy of the reference has the best likeness and the most kept pixels, so a copy gets 0
from both. dlib finds and compares faces; its weights are in the package ``face_recognition_models``.
"""

import importlib
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from paco_grpo.item import Item
from paco_grpo.rewards.contract import ScoreFn, with_attributes
from paco_grpo.rewards.judge import check_references

Faces = Callable[[Image.Image], np.ndarray]

TOLERANCE = 16.0  # of 255: a VAE changes pixels that an edit keeps
MIN_CHANGED = 0.005
MIN_OUTSIDE = 0.01  # share of the image outside the edit


def kept_pixels(tolerance: float = TOLERANCE, min_changed: float = MIN_CHANGED) -> ScoreFn:
    """Share of pixels outside the edit that are as in the first reference image, in [0, 1].

    Where the edit is, an item's row may say: ``"edit_box": [left, top, right, bottom]`` in shares
    of width and height, not over everything. Else all pixels count.

    Args:
        tolerance: Mean difference over RGB, of 255, up to which a pixel is kept.
        min_changed: A smaller share of changed pixels, of all, is a copy and gets 0.
    """

    def share(image: Image.Image, item: Item) -> float:
        changed = _changed(image, item, tolerance)
        if changed.mean() < min_changed:
            return 0.0
        box = item.metadata.get("edit_box")
        outside = _outside(box, *changed.shape) if box else np.ones_like(changed)
        return 1 - changed[outside].mean()

    def score(images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        return np.array([share(*pair) for pair in zip(images, items, strict=True)])

    return score


def face_likeness(tolerance: float = TOLERANCE, min_changed: float = MIN_CHANGED) -> ScoreFn:
    """1 − distance of the largest face of each reference to the nearest one in the edit, in [0, 1].

    Mean over references (``Item.crops``) with a face; without any, the score is missing. 0 if the
    edit has no face.
    dlib's threshold for one person is a likeness of 0.4. It computes on the CPU.

    Args:
        tolerance, min_changed: As of ``kept_pixels``: a copy gets 0.
    """
    for package in ("dlib", "face_recognition_models"):
        importlib.import_module(package)

    def likeness(image: Image.Image, item: Item) -> float:
        if _changed(image, item, tolerance).mean() < min_changed:
            return 0.0
        find = _finder()
        found = find(image)
        likenesses = []
        for reference in item.crops:
            faces = find(reference)
            if len(faces):
                distances = np.linalg.norm(found - faces[0], axis=1)
                likenesses.append(max(0.0, 1 - distances.min(initial=1.0)))
        return float(np.mean(likenesses)) if likenesses else math.nan

    def score(images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        return np.array([likeness(*pair) for pair in zip(images, items, strict=True)])

    return score


def _check_box(item: Item) -> None:
    """Raises ValueError: The item has no reference image, or a box in pixels or over everything."""
    check_references(item, "kept_pixels")
    box = item.metadata.get("edit_box")
    if not box:
        return
    left, top, right, bottom = box
    if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
        raise ValueError(
            f"kept_pixels: the item has edit_box={box}, not "
            "[left, top, right, bottom] in shares of width and height"
        )
    if 1 - (right - left) * (bottom - top) < MIN_OUTSIDE:
        raise ValueError(
            f"kept_pixels: the item has edit_box={box}, which leaves less than "
            f"{MIN_OUTSIDE:.0%} of the image to be kept"
        )


with_attributes(kept_pixels, check_item=_check_box)
with_attributes(face_likeness, check_item=lambda item: check_references(item, "face_likeness"))


def _outside(box: Sequence[float], height: int, width: int) -> np.ndarray:
    """(height, width) bool: the pixels outside the box; a small image has some, too."""
    left, top, right, bottom = np.array(box) * (width, height, width, height)
    outside = np.ones((height, width), dtype=bool)
    outside[round(top) : round(bottom), round(left) : round(right)] = False
    if not outside.any():
        outside[:] = True
        outside[math.ceil(top) : math.floor(bottom), math.ceil(left) : math.floor(right)] = False
    return outside


def _changed(image: Image.Image, item: Item, tolerance: float) -> np.ndarray:
    """(height, width) bool: where the image differs from its first reference, resized to it."""
    reference = item.images[0].convert("RGB").resize(image.size, Image.Resampling.LANCZOS)
    before = np.asarray(reference, dtype=np.float32)
    after = np.asarray(image.convert("RGB"), dtype=np.float32)
    return np.abs(after - before).mean(axis=2) > tolerance


@cache
def _finder() -> Faces:
    """An image → features (n, 128) of its faces, the largest first."""
    import dlib  # pyright: ignore[reportMissingImports]
    import face_recognition_models  # pyright: ignore[reportMissingImports]

    models = Path(face_recognition_models.__path__[0]) / "models"
    detect = dlib.get_frontal_face_detector()
    predict = dlib.shape_predictor(str(models / "shape_predictor_5_face_landmarks.dat"))
    network = dlib.face_recognition_model_v1(
        str(models / "dlib_face_recognition_resnet_model_v1.dat")
    )

    def find(image: Image.Image) -> np.ndarray:
        pixels = np.ascontiguousarray(image.convert("RGB"))
        boxes = sorted(detect(pixels, 1), key=lambda box: -box.area())
        features = []
        for box in boxes:
            features.append(network.compute_face_descriptor(pixels, predict(pixels, box)))
        return np.array(features).reshape(-1, 128)

    return find
