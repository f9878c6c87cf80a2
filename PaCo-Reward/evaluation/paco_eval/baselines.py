"""Similarities that need no judge, as engines: a pair's score is a number in [0, 1], its question is not read."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from paco_eval.errors import BenchError
from paco_judge.client import Pair
from paco_judge.verdict import Verdict

CLIP_MODEL, CLIP_PRETRAINED = "ViT-H-14", "laion2b_s32b_b79k"
DREAMSIM_TYPE = "ensemble"
PIXEL_SIDE = 32
HISTOGRAM_BINS = 8

# Images to what is compared, (n, D) float64; two rows of that to a similarity in [0, 1].
Describe = Callable[[Sequence[Image.Image]], np.ndarray]
Compare = Callable[[np.ndarray, np.ndarray], float]


@dataclass(frozen=True)
class Similarity:
    """An engine that describes each image of a batch once, however many pairs it is in."""

    describe: Describe
    compare: Compare

    def __call__(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """One similarity for each pair, in order; an error where it is not a number."""
        images = {id(image): image for pair in pairs for image in (pair.image_a, pair.image_b)}
        described = dict(zip(images, self.describe(list(images.values())), strict=True))
        values = [self.compare(described[id(pair.image_a)], described[id(pair.image_b)]) for pair in pairs]
        return [Verdict(float(v)) if np.isfinite(v) else Verdict(None, "the similarity is no number") for v in values]


def pixels(images: Sequence[Image.Image]) -> np.ndarray:
    """RGB in [0, 1] at 32 x 32 (area-averaged), flat."""
    small = [image.convert("RGB").resize((PIXEL_SIDE, PIXEL_SIDE), Image.Resampling.BOX) for image in images]
    return np.stack([np.asarray(image, dtype=np.float64).ravel() / 255 for image in small])


def closeness(a: np.ndarray, b: np.ndarray) -> float:
    """1 − mean |a − b| of values in [0, 1]."""
    return 1.0 - np.abs(a - b).mean()


def histograms(images: Sequence[Image.Image]) -> np.ndarray:
    """Share of pixels in each of 8 x 8 x 8 RGB cells; a row sums to 1."""
    rows = []
    for image in images:
        cell = np.asarray(image.convert("RGB"), dtype=np.int64).reshape(-1, 3) * HISTOGRAM_BINS // 256
        index = np.ravel_multi_index(cell.T, (HISTOGRAM_BINS,) * 3)
        rows.append(np.bincount(index, minlength=HISTOGRAM_BINS**3) / len(index))
    return np.stack(rows)


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Histogram intersection: Σ min(a, b)."""
    return min(np.minimum(a, b).sum(), 1.0)


def half_cosine(a: np.ndarray, b: np.ndarray) -> float:
    """(1 + cosine) / 2 of two unit vectors, in [0, 1]."""
    return float(np.clip((1.0 + a @ b) / 2, 0.0, 1.0))


def clip_features(weights: str | None, model: str | None, batch_size: int) -> Describe:
    """OpenCLIP's normalised image features; see `load_clip`."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    clip, preprocess = load_clip(weights, model, device)

    def describe(images: Sequence[Image.Image]) -> np.ndarray:
        return _in_batches(images, preprocess, lambda x: clip.encode_image(x.to(device), normalize=True), batch_size)

    return describe


def load_clip(weights: str | None, model: str | None, device: str):
    """An OpenCLIP model in evaluation mode and its preprocessing.

    Args:
        weights: None (the hub), a folder with open_clip_config.json and weights, or a .safetensors file.
        model: architecture, default ViT-H-14 with the weights laion2b_s32b_b79k; or hf-hub:NAME, with its own.

    Raises:
        BenchError: open_clip is missing, or the model cannot be loaded.
    """
    try:
        import open_clip
    except ImportError as error:
        raise BenchError(_missing("clip_i", "open_clip_torch", error)) from error
    name = model or CLIP_MODEL
    pretrained = None if name.startswith("hf-hub:") else CLIP_PRETRAINED
    if weights and Path(weights).is_dir():
        name, pretrained = f"local-dir:{weights}", None
    elif weights and Path(weights).suffix == ".safetensors":
        pretrained = weights
    elif weights:
        raise BenchError(f"--weights {weights} is neither a folder with open_clip_config.json nor a .safetensors file")
    try:
        loaded, _, preprocess = open_clip.create_model_and_transforms(name, pretrained=pretrained, device=device)
    except (OSError, RuntimeError, ValueError) as error:
        raise BenchError(
            f"OpenCLIP {name} {pretrained or ''} cannot be loaded: {_first_line(error)}; set HF_ENDPOINT to a mirror "
            "that you can reach, or pass --weights"
        ) from error
    return loaded.eval(), preprocess


def dreamsim_features(weights: str | None, kind: str | None, batch_size: int) -> Describe:
    """DreamSim's normalised embeddings (arXiv 2306.09344): its distance is 1 − their cosine.

    Args:
        weights: folder with the unpacked release; None: downloaded from its authors to the cache.

    Raises:
        BenchError: the package is missing, or the weights cannot be had.
    """
    try:
        import torch
        from dreamsim import dreamsim
    except ImportError as error:
        raise BenchError(_missing("dreamsim", "dreamsim", error)) from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = kind or DREAMSIM_TYPE
    folder = Path(weights) if weights else Path(torch.hub.get_dir()) / "dreamsim" / kind
    if weights and not folder.is_dir():
        raise BenchError(f"--weights {weights} is no folder")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        model, preprocess = dreamsim(device=device, cache_dir=str(folder), dreamsim_type=kind)
    except KeyError as error:
        raise BenchError(f"there is no DreamSim {kind!r}; its README names them") from error
    except (OSError, RuntimeError, ValueError) as error:
        raise BenchError(
            f"DreamSim {kind} cannot be had in {folder}: {_first_line(error)}; unpack the archive of its release page "
            "there, or pass --weights"
        ) from error

    def describe(images: Sequence[Image.Image]) -> np.ndarray:
        return _in_batches(images, lambda image: preprocess(image)[0], lambda x: model.embed(x.to(device)), batch_size)

    return describe


def _in_batches(images: Sequence[Image.Image], preprocess: Callable, encode: Callable, batch_size: int) -> np.ndarray:
    """Unit vectors (n, D) float64 of the images' encodings."""
    import torch

    parts = []
    with torch.inference_mode():
        for start in range(0, len(images), batch_size):
            x = torch.stack([preprocess(image.convert("RGB")) for image in images[start : start + batch_size]])
            parts.append(encode(x).double().cpu().numpy())
    found = np.concatenate(parts)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


BASELINES = ("clip_i", "dreamsim", "pixel", "histogram")


def make_baseline(
    name: str, weights: str | None, clip_model: str | None, dreamsim_type: str | None, batch_size: int
) -> Similarity:
    """The engine of one of `BASELINES`. Raises BenchError where it cannot be had."""
    if name == "clip_i":
        return Similarity(clip_features(weights, clip_model, batch_size), half_cosine)
    if name == "dreamsim":
        return Similarity(dreamsim_features(weights, dreamsim_type, batch_size), half_cosine)
    return Similarity(pixels, closeness) if name == "pixel" else Similarity(histograms, overlap)


def baseline_names(
    name: str, weights: str | None, clip_model: str | None, dreamsim_type: str | None
) -> tuple[str, str]:
    """Which baseline this is: (exactly, for the rows of a results file; short, for the file's name)."""
    kind = {"clip_i": clip_model, "dreamsim": dreamsim_type}.get(name)
    default = {"clip_i": f"{CLIP_MODEL} {CLIP_PRETRAINED}", "dreamsim": DREAMSIM_TYPE}.get(name, "")
    chosen = [part for part in (kind, weights and str(Path(weights).resolve())) if part]
    exact = " ".join([name, *(chosen or [default])]).strip()
    return exact, "+".join([name, *(Path(part).name.removesuffix(".safetensors") for part in chosen)])


def _missing(scorer: str, package: str, error: ImportError) -> str:
    return f"--scorer {scorer} needs the package {package}, which {sys.executable} lacks ({error}); pip install {package}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
