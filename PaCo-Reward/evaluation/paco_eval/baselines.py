"""Image similarities in [0, 1] that need no judge, as engines that ignore the question."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from paco_eval.engines import ScorePairs
from paco_eval.results import BenchError, first_line
from paco_judge.client import Pair
from paco_judge.verdict import Verdict

BASELINES = ("clip_i", "dreamsim", "histogram")
CLIP_MODEL, CLIP_PRETRAINED = "ViT-H-14", "laion2b_s32b_b79k"
DREAMSIM_TYPE = "ensemble"
HISTOGRAM_BINS = 8


def make_baseline(name: str, weights: str | None = None, kind: str | None = None, batch_size: int = 8) -> ScorePairs:
    """One of ``BASELINES`` as an engine. Raises BenchError if its package or weights are missing.

    Args:
        name: The baseline.
        weights: Local weights of ``clip_i`` (folder or .safetensors file) or ``dreamsim`` (folder).
        kind: OpenCLIP architecture or ``hf-hub:NAME``; or the type of DreamSim.
        batch_size: Images encoded at once.
    """
    if weights and not Path(weights).exists():
        raise BenchError(f"--weights {weights} does not exist")
    package, load = {"clip_i": ("open_clip_torch", _clip), "dreamsim": ("dreamsim", _dreamsim)}.get(name, ("", None))
    try:
        describe = _features(*load(weights, kind), batch_size) if load else histograms
    except ImportError as error:
        raise BenchError(f"--scorer {name} needs the package {package} ({error}); pip install {package}") from error
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise BenchError(f"{name} {kind or ''}: {first_line(error)}; correct its type, or pass --weights") from error

    def score(pairs: Sequence[Pair]) -> list[Verdict]:
        images = {id(image): image for pair in pairs for image in pair.images}  # each is described once
        described = dict(zip(images, describe(list(images.values())), strict=True))
        a, b = (np.stack([described[id(pair.images[i])] for pair in pairs]) for i in (0, 1))
        values = (1.0 + (a * b).sum(1)) / 2 if load else np.minimum(a, b).sum(1)  # (1 + cosine) / 2, or the overlap
        return [
            Verdict(min(max(v, 0.0), 1.0)) if np.isfinite(v) else Verdict(None, "the similarity is not finite")
            for v in values.tolist()
        ]

    return score


def baseline_names(name: str, weights: str | None = None, kind: str | None = None) -> tuple[str, str]:
    """The baseline's exact name, for the rows of a results file, and its short name, for the file's name."""
    default = {"clip_i": [f"{CLIP_MODEL} {CLIP_PRETRAINED}"], "dreamsim": [DREAMSIM_TYPE]}.get(name, [])
    chosen = [part for part in (kind, weights and str(Path(weights).resolve())) if part]
    short = [name, *(Path(part).name.removesuffix(".safetensors") for part in chosen)]
    return " ".join([name, *(chosen or default)]), "+".join(short)


def histograms(images: Sequence[Image.Image]) -> np.ndarray:
    """Share of pixels in each of 8 x 8 x 8 RGB cells, (n, 512); rows sum to 1."""
    pixels = [np.asarray(image.convert("RGB")).reshape(-1, 3) for image in images]
    rows = [np.histogramdd(rgb, HISTOGRAM_BINS, [(0, 256)] * 3)[0].ravel() / len(rgb) for rgb in pixels]
    return np.stack(rows)


def _clip(weights: str | None, model: str | None) -> tuple[Callable, Callable]:
    """Preprocessing and encoder of an OpenCLIP model; default: ViT-H-14 with the weights laion2b_s32b_b79k."""
    import open_clip

    name = model or CLIP_MODEL
    pretrained = weights or (None if name.startswith("hf-hub:") else CLIP_PRETRAINED)
    if weights and Path(weights).is_dir():
        name, pretrained = f"local-dir:{weights}", None
    clip, _, preprocess = open_clip.create_model_and_transforms(name, pretrained=pretrained, device=_device())
    clip.eval()
    return preprocess, lambda x: clip.encode_image(x, normalize=True)


def _dreamsim(weights: str | None, kind: str | None) -> tuple[Callable, Callable]:
    """Preprocessing and embedding of DreamSim (arXiv 2306.09344); a cosine is 1 − its distance.

    Without ``weights``, a folder with the unpacked release, its authors' release is downloaded to the cache.
    """
    import torch
    from dreamsim import dreamsim

    kind = kind or DREAMSIM_TYPE
    folder = Path(weights or Path(torch.hub.get_dir()) / "dreamsim" / kind)
    folder.mkdir(parents=True, exist_ok=True)
    model, preprocess = dreamsim(device=_device(), cache_dir=str(folder), dreamsim_type=kind)
    return lambda image: preprocess(image)[0], model.embed


def _features(preprocess: Callable, encode: Callable, batch_size: int) -> Callable:
    """A function of images: unit vectors of their encodings, (n, D) float64."""
    import torch

    @torch.inference_mode()
    def describe(images: Sequence[Image.Image]) -> np.ndarray:
        tensors = torch.stack([preprocess(image.convert("RGB")) for image in images])
        parts = [encode(part.to(_device())).double().cpu().numpy() for part in tensors.split(batch_size)]
        features = np.concatenate(parts)
        return features / np.linalg.norm(features, axis=1, keepdims=True)

    return describe


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
