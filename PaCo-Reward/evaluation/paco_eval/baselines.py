"""Image similarities in [0, 1] that need no judge, as engines that ignore the question."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from paco_eval.results import BenchError, first_line
from paco_judge.client import Pair
from paco_judge.verdict import Verdict

BASELINES = ("clip_i", "dreamsim", "histogram")
CLIP_MODEL, CLIP_PRETRAINED = "ViT-H-14", "laion2b_s32b_b79k"
DREAMSIM_TYPE = "ensemble"
HISTOGRAM_BINS = 8

Describe = Callable[[Sequence[Image.Image]], np.ndarray]  # n images -> descriptions (n, D) float64
Compare = Callable[[np.ndarray, np.ndarray], float]  # two descriptions (D,) -> similarity in [0, 1]


@dataclass(frozen=True)
class Similarity:
    """An engine that describes each image of a batch once, however many pairs contain it."""

    describe: Describe
    compare: Compare

    def __call__(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """The similarity of each pair, in order; an error where it is not a finite number."""
        images = {id(image): image for pair in pairs for image in pair.images}
        described = dict(zip(images, self.describe(list(images.values())), strict=True))
        values = [self.compare(described[id(pair.image_a)], described[id(pair.image_b)]) for pair in pairs]
        return [Verdict(float(v)) if np.isfinite(v) else Verdict(None, "the similarity is not finite") for v in values]


def make_baseline(name: str, weights: str | None = None, kind: str | None = None, batch_size: int = 8) -> Similarity:
    """One of ``BASELINES`` as an engine. Raises BenchError if its package or weights are missing.

    Args:
        name: The baseline.
        weights: Local weights of ``clip_i`` (folder or .safetensors file) or ``dreamsim`` (folder).
        kind: OpenCLIP architecture or ``hf-hub:NAME``; or the type of DreamSim.
        batch_size: Images encoded at once.
    """
    if name == "clip_i":
        return Similarity(_clip_features(weights, kind, batch_size), half_cosine)
    if name == "dreamsim":
        return Similarity(_dreamsim_features(weights, kind, batch_size), half_cosine)
    return Similarity(histograms, lambda a, b: min(np.minimum(a, b).sum(), 1.0))


def baseline_names(name: str, weights: str | None = None, kind: str | None = None) -> tuple[str, str]:
    """The baseline's exact name, for the rows of a results file, and its short name, for the file's name."""
    default = {"clip_i": [f"{CLIP_MODEL} {CLIP_PRETRAINED}"], "dreamsim": [DREAMSIM_TYPE]}.get(name, [])
    chosen = [part for part in (kind, weights and str(Path(weights).resolve())) if part]
    short = [name, *(Path(part).name.removesuffix(".safetensors") for part in chosen)]
    return " ".join([name, *(chosen or default)]), "+".join(short)


def histograms(images: Sequence[Image.Image]) -> np.ndarray:
    """Share of pixels in each of 8 x 8 x 8 RGB cells, (n, 512); rows sum to 1."""
    rows = []
    for image in images:
        cell = np.asarray(image.convert("RGB"), dtype=np.int64).reshape(-1, 3) * HISTOGRAM_BINS // 256
        index = np.ravel_multi_index(cell.T, (HISTOGRAM_BINS,) * 3)
        rows.append(np.bincount(index, minlength=HISTOGRAM_BINS**3) / len(index))
    return np.stack(rows)


def half_cosine(a: np.ndarray, b: np.ndarray) -> float:
    """(1 + cosine) / 2 of two unit vectors, in [0, 1]."""
    return float(np.clip((1.0 + a @ b) / 2, 0.0, 1.0))


def _clip_features(weights: str | None, model: str | None, batch_size: int) -> Describe:
    """Image features of an OpenCLIP model; by default ViT-H-14 with the weights laion2b_s32b_b79k from the hub."""
    try:
        import open_clip
    except ImportError as error:
        raise _missing_package("clip_i", "open_clip_torch", error) from error
    device = _device()
    name = model or CLIP_MODEL
    pretrained = None if name.startswith("hf-hub:") else CLIP_PRETRAINED
    if weights and Path(weights).is_dir():
        name, pretrained = f"local-dir:{weights}", None
    elif weights and Path(weights).suffix == ".safetensors":
        pretrained = weights
    elif weights:
        raise BenchError(f"--weights {weights} is neither a folder with open_clip_config.json nor a .safetensors file")
    try:
        clip, _, preprocess = open_clip.create_model_and_transforms(name, pretrained=pretrained, device=device)
    except (OSError, RuntimeError, ValueError) as error:
        raise BenchError(
            f"OpenCLIP {name} {pretrained or ''} could not be loaded: {first_line(error)}; set HF_ENDPOINT to a "
            "mirror that you can reach, or pass --weights"
        ) from error
    clip.eval()
    return _features(preprocess, lambda x: clip.encode_image(x.to(device), normalize=True), batch_size)


def _dreamsim_features(weights: str | None, kind: str | None, batch_size: int) -> Describe:
    """DreamSim's embeddings (arXiv 2306.09344), whose cosine is 1 − its distance.

    Without ``weights``, a folder with the unpacked release, its authors' release is downloaded to the cache.
    """
    try:
        import torch
        from dreamsim import dreamsim
    except ImportError as error:
        raise _missing_package("dreamsim", "dreamsim", error) from error
    device = _device()
    kind = kind or DREAMSIM_TYPE
    folder = Path(weights) if weights else Path(torch.hub.get_dir()) / "dreamsim" / kind
    if weights and not folder.is_dir():
        raise BenchError(f"--weights {weights} is not a folder")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        model, preprocess = dreamsim(device=device, cache_dir=str(folder), dreamsim_type=kind)
    except KeyError as error:
        raise BenchError(f"--dreamsim_type {kind} does not exist; see the README of DreamSim for its types") from error
    except (OSError, RuntimeError, ValueError) as error:
        raise BenchError(
            f"DreamSim {kind} could not be loaded from {folder}: {first_line(error)}; unpack the archive of its "
            "release page there, or pass --weights"
        ) from error
    return _features(lambda image: preprocess(image)[0], lambda x: model.embed(x.to(device)), batch_size)


def _features(preprocess: Callable, encode: Callable, batch_size: int) -> Describe:
    """Unit vectors (n, D) float64 of the images' encodings."""
    import torch

    @torch.inference_mode()
    def describe(images: Sequence[Image.Image]) -> np.ndarray:
        parts = []
        for start in range(0, len(images), batch_size):
            x = torch.stack([preprocess(image.convert("RGB")) for image in images[start : start + batch_size]])
            parts.append(encode(x).double().cpu().numpy())
        features = np.concatenate(parts)
        return features / np.linalg.norm(features, axis=1, keepdims=True)

    return describe


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _missing_package(scorer: str, package: str, error: ImportError) -> BenchError:
    return BenchError(
        f"--scorer {scorer} needs the package {package}, which {sys.executable} lacks ({error}); pip install {package}"
    )
