"""Image similarities in [0, 1] that need no judge, as engines that ignore the question."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from paco_eval.engines import ScorePairs
from paco_eval.results import BenchError
from paco_judge.client import Pair
from paco_judge.verdict import Verdict

BASELINES = {  # --scorer -> its exact name, for the rows of a results file
    "clip_i": "clip_i ViT-H-14 laion2b_s32b_b79k",
    "dreamsim": "dreamsim ensemble",
    "histogram": "histogram",
}
CLIP = ("ViT-H-14", "laion2b_s32b_b79k")  # OpenCLIP's names of architecture and weights
DREAMSIM_TYPE = "ensemble"


def make_baseline(name: str, batch_size: int = 8) -> ScorePairs:
    """One of ``BASELINES`` as an engine that encodes ``batch_size`` images at once. Raises BenchError without its package."""
    package, load = {"clip_i": ("open_clip_torch", _clip), "dreamsim": ("dreamsim", _dreamsim)}.get(
        name, ("", None)
    )
    try:
        describe = _features(load, batch_size) if load else histograms
    except ImportError as error:
        raise BenchError(
            f"--scorer {name} needs the package {package} ({error}); pip install {package}"
        ) from error

    def score(pairs: Sequence[Pair]) -> list[Verdict]:
        images = {
            id(image): image for pair in pairs for image in pair.images
        }  # each is described once
        described = dict(zip(images, describe(list(images.values())), strict=True))
        a, b = (np.stack([described[id(pair.images[i])] for pair in pairs]) for i in (0, 1))
        values = (
            (1.0 + (a * b).sum(1)) / 2 if load else np.minimum(a, b).sum(1)
        )  # (1 + cosine) / 2, or the overlap
        return [Verdict(value) for value in values.clip(0.0, 1.0).tolist()]

    return score


def histograms(images: Sequence[Image.Image]) -> np.ndarray:
    """Share of pixels in each of 8 x 8 x 8 RGB cells, (n, 512); rows sum to 1."""
    pixels = [np.asarray(image.convert("RGB")).reshape(-1, 3) for image in images]
    rows = [np.histogramdd(rgb, 8, [(0, 256)] * 3)[0].ravel() / len(rgb) for rgb in pixels]
    return np.stack(rows)


def _clip(device: str) -> tuple[Callable, Callable]:
    """Preprocessing and encoder of OpenCLIP; weights from the hub."""
    import open_clip

    model, pretrained = CLIP
    clip, _, preprocess = open_clip.create_model_and_transforms(
        model, pretrained=pretrained, device=device
    )
    clip.eval()
    return preprocess, lambda x: clip.encode_image(x, normalize=True)


def _dreamsim(device: str) -> tuple[Callable, Callable]:
    """Preprocessing and embedding of DreamSim (arXiv 2306.09344); a cosine is 1 − its distance.

    Its authors' release is downloaded to ``dreamsim`` in the cache of ``torch.hub``.
    """
    import torch
    from dreamsim import dreamsim

    folder = Path(torch.hub.get_dir()) / "dreamsim" / DREAMSIM_TYPE
    folder.mkdir(parents=True, exist_ok=True)
    model, preprocess = dreamsim(device=device, cache_dir=str(folder), dreamsim_type=DREAMSIM_TYPE)
    return lambda image: preprocess(image)[0], model.embed


def _features(load: Callable[[str], tuple[Callable, Callable]], batch_size: int) -> Callable:
    """A function of images: unit vectors of their encodings, (n, D) float64."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    preprocess, encode = load(device)

    @torch.inference_mode()
    def describe(images: Sequence[Image.Image]) -> np.ndarray:
        tensors = torch.stack([preprocess(image.convert("RGB")) for image in images])
        parts = [
            encode(part.to(device)).double().cpu().numpy() for part in tensors.split(batch_size)
        ]
        features = np.concatenate(parts)
        return features / np.linalg.norm(features, axis=1, keepdims=True)

    return describe
