"""Image similarities in [0, 1] that need no judge and ignore the question (``eval.py --scorer``)."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paco_eval.judges import ScorePairs
from paco_judge.errors import UserError
from paco_judge.questions import Pair
from paco_judge.verdict import Verdict
from paco_judge.weights import explain_missing

BASELINES = {  # --scorer -> its exact name, for the rows of a results file
    "clip_i": "clip_i ViT-H-14 laion2b_s32b_b79k",
    "dreamsim": "dreamsim ensemble",
    "histogram": "histogram",
}
CLIP = ("ViT-H-14", "laion2b_s32b_b79k")  # OpenCLIP's names of architecture and weights
DREAMSIM_TYPE = "ensemble"


def make_baseline(name: str, batch_size: int = 8) -> ScorePairs:
    """One of ``BASELINES`` as an engine that encodes ``batch_size`` images at once.

    Raises UserError: Its package is missing, or its weights.
    """
    if name == "histogram":
        return partial(_similarities, histograms, _overlap)
    package, load = ("open_clip_torch", _clip) if name == "clip_i" else ("dreamsim", _dreamsim)
    try:
        features = ImageFeatures(load, batch_size)
    except ImportError as error:
        raise UserError(
            f"--scorer {name} needs the package {package} ({error}); pip install {package}"
        ) from error
    return partial(_similarities, features, _cosine_to_one)


def _similarities(
    describe: Callable[[Sequence[Image.Image]], np.ndarray],
    compare: Callable[[np.ndarray, np.ndarray], np.ndarray],
    pairs: Sequence[Pair],
) -> list[Verdict]:
    """How similar the two images of each pair are. Every image is described once."""
    images = {}
    for pair in pairs:
        for image in pair.images:
            images[id(image)] = image
    descriptions = dict(zip(images, describe(list(images.values())), strict=True))
    firsts = np.stack([descriptions[id(pair.image_a)] for pair in pairs])
    seconds = np.stack([descriptions[id(pair.image_b)] for pair in pairs])
    values = compare(firsts, seconds).clip(0.0, 1.0)
    return list(map(Verdict, values.tolist()))


def _overlap(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.minimum(first, second).sum(1)


def _cosine_to_one(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(1 + cosine) / 2 of unit vectors."""
    return (1.0 + (first * second).sum(1)) / 2


def histograms(images: Sequence[Image.Image]) -> np.ndarray:
    """Share of pixels in each of 8 x 8 x 8 RGB cells, (n, 512); rows sum to 1."""
    rows = []
    for image in images:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
        counts, _ = np.histogramdd(pixels, 8, [(0, 256)] * 3)
        rows.append(counts.ravel() / len(pixels))
    return np.stack(rows)


def _clip(device: str) -> tuple[Callable, Callable]:
    """Preprocessing and encoder of OpenCLIP; weights from the hub. Raises UserError."""
    import open_clip

    model, pretrained = CLIP
    hub_name = open_clip.get_pretrained_cfg(model, pretrained or "").get("hf_hub", "").rstrip("/")
    with explain_missing(hub_name or model):
        clip, _, preprocess = open_clip.create_model_and_transforms(
            model, pretrained=pretrained, device=device
        )
    clip.eval()
    return preprocess, partial(clip.encode_image, normalize=True)


def _dreamsim(device: str) -> tuple[Callable, Callable]:
    """Preprocessing and embedding of DreamSim (arXiv 2306.09344); a cosine is 1 − its distance.

    Its authors' release is downloaded to ``dreamsim`` in the cache of ``torch.hub``.
    """
    import torch
    from dreamsim import dreamsim

    folder = Path(torch.hub.get_dir()) / "dreamsim" / DREAMSIM_TYPE
    folder.mkdir(parents=True, exist_ok=True)
    model, preprocess = dreamsim(device=device, cache_dir=str(folder), dreamsim_type=DREAMSIM_TYPE)

    def first_of_batch(image: Image.Image) -> Any:
        return preprocess(image)[0]

    return first_of_batch, model.embed


class ImageFeatures:
    """Unit vectors of images' encodings.

    Args:
        load: Returns a model's preprocessing of an image and its encoder of a batch.
        batch_size: Images encoded at once.
    """

    def __init__(self, load: Callable[[str], tuple[Callable, Callable]], batch_size: int) -> None:
        import torch

        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._batch_size = batch_size
        self._preprocess, self._encode = load(self._device)

    def __call__(self, images: Sequence[Image.Image]) -> np.ndarray:
        """(n, D) float64."""
        import torch

        tensors = torch.stack([self._preprocess(image.convert("RGB")) for image in images])
        parts = []
        with torch.inference_mode():
            for part in tensors.split(self._batch_size):
                parts.append(self._encode(part.to(self._device)).double().cpu().numpy())
        features = np.concatenate(parts)
        return features / np.linalg.norm(features, axis=1, keepdims=True)
