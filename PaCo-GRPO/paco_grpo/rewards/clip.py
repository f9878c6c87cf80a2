"""CLIP rewards: whole image against whole prompt (pickscore, clipscore), sub-figures (subfig_clipT, subfig_clipI).

Models are loaded by ``check``, before training, or at the first image. Features of texts are kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import normalize

from paco_grpo.rewards.errors import RewardError
from paco_grpo.rewards.subfigures import SubfigurePairs, check_panels
from paco_grpo.types import Item
from paco_judge.grid import split_image, split_prompt
from paco_judge.weights import from_pretrained_strict

PICKSCORE, PICKSCORE_PROCESSOR = "yuvalkirstain/PickScore_v1", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
CLIPSCORE = "openai/clip-vit-large-patch14"
OPEN_CLIP, OPEN_CLIP_WEIGHTS = "ViT-H-14", "laion2b_s32b_b79k"


def _dtype(name: str) -> torch.dtype:
    """Of a reward's weights.

    Raises:
        ValueError: The name is none of these.
    """
    if name not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"dtype {name!r} is not float32, float16 or bfloat16")
    return getattr(torch, name)


@contextmanager
def _loading(model: str, command: str) -> Iterator[None]:
    """Errors of loading become a RewardError: files are absent, or tensors are missing or do not fit."""
    try:
        yield
    except Exception as error:  # hub and network errors share no class
        raise RewardError(
            f"CLIP model {model} cannot be loaded ({type(error).__name__}: {error}). If its weights are absent, run "
            f"`{command}` where there is a network and copy its cache (HF_HOME), or set HF_ENDPOINT to a mirror"
        ) from error


def download(what: str, load: Callable[[], object]) -> None:
    """What the download commands do: load ``what`` once, so that it is in the cache.

    Raises:
        SystemExit: That failed; the message says what to do.
    """
    try:
        load()
    except RewardError as error:
        raise SystemExit(f"error: {error}") from error
    print(f"{what} is in the cache")


class ClipTextImage:
    """logit_scale · cos(image, prompt) / scale of a transformers CLIP model.

    ``model`` and ``processor`` are hub names or folders. ``scale`` is about the largest score in practice, so that rewards
    are of order 1.
    """

    def __init__(
        self, model: str, processor: str, scale: float, device: torch.device | str, batch_size: int, dtype: str
    ) -> None:
        self.name, self.processor_name, self.scale, self.dtype = model, processor, scale, _dtype(dtype)
        self.device, self.batch_size = torch.device(device), batch_size
        self._model = None
        self._texts: dict[str, torch.Tensor] = {}

    def load(self) -> None:
        """Load the model (downloads it if it is not in the cache)."""
        if self._model is None:
            from transformers import CLIPModel, CLIPProcessor

            command = "python paco_grpo/rewards/pickscore_scores.py"
            with _loading(self.name, command if self.name == PICKSCORE else f"hf download {self.name}"):
                self._processor = CLIPProcessor.from_pretrained(self.processor_name)
                model = from_pretrained_strict(CLIPModel, self.name)
                self._model = model.eval().requires_grad_(False).to(self.device, self.dtype)

    check = load  # weights that are not whole are found before training

    @torch.no_grad()
    def image_features(self, images: Sequence[Image.Image]) -> torch.Tensor:
        """Unit features (n, d) float32 of a batch."""
        self.load()
        batch = [image.convert("RGB") for image in images]
        pixels = self._processor(images=batch, return_tensors="pt")["pixel_values"].to(self.device, self.dtype)
        vision = self._model.vision_model(pixel_values=pixels).pooler_output
        return normalize(self._model.visual_projection(vision).float(), dim=-1)

    @torch.no_grad()
    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64."""
        self.load()
        for prompt in {item.prompt for item in items} - self._texts.keys():
            tokens = self._processor(text=[prompt], truncation=True, max_length=77, return_tensors="pt").to(self.device)
            output = self._model.text_model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
            self._texts[prompt] = normalize(self._model.text_projection(output.pooler_output)[0].float(), dim=-1)
        scores = []
        for start in range(0, len(images), self.batch_size):
            features = self.image_features(images[start : start + self.batch_size])
            texts = torch.stack([self._texts[item.prompt] for item in items[start : start + self.batch_size]])
            scores.append((self._model.logit_scale.float().exp() * (features * texts).sum(dim=-1)).double().cpu().numpy())
        return np.concatenate(scores) / self.scale


def pickscore(
    model: str = PICKSCORE,
    processor: str = PICKSCORE_PROCESSOR,
    device: torch.device | str = "cpu",
    batch_size: int = 8,
    dtype: str = "float32",
) -> ClipTextImage:
    """Human preference for an image given its prompt (Pick-a-Pic, arXiv 2305.01569): logit_scale · cos / 26.

    ``dtype``: of the weights; float16 takes half the memory and rounds scores by about 1e-3.
    """
    return ClipTextImage(model, processor, 26.0, device, batch_size, dtype)


def clipscore(
    model: str = CLIPSCORE,
    processor: str | None = None,
    device: torch.device | str = "cpu",
    batch_size: int = 8,
    dtype: str = "float32",
) -> ClipTextImage:
    """logit_scale · cos(image, prompt) / 30, as in Flow-GRPO's released code. ``processor``: None = the model's."""
    return ClipTextImage(model, processor or model, 30.0, device, batch_size, dtype)


class OpenClip:
    """Unit features of images and texts; see ``subfig_clipT``. Safe for several reward threads."""

    def __init__(self, model: str, pretrained: str | None, device: torch.device, dtype: str) -> None:
        self.name, self.pretrained, self.device, self.dtype = model, pretrained, device, _dtype(dtype)
        self._model = None
        self._texts: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()

    def load(self) -> None:
        """Load the model (downloads it if it is not in the cache)."""
        with self._lock:
            if self._model is None:
                import open_clip

                with _loading(f"{self.name} ({self.pretrained})", "python paco_grpo/rewards/subfig_clipT.py"):
                    model, _, self._preprocess = open_clip.create_model_and_transforms(
                        self.name, pretrained=self.pretrained, device=self.device
                    )
                    self._tokenize = open_clip.get_tokenizer(self.name)
                self._model = model.eval().requires_grad_(False).to(self.dtype)

    @torch.no_grad()
    def images(self, images: Sequence[Image.Image], batch_size: int) -> torch.Tensor:
        """Unit features (n, C) float32 of ``images``, ``batch_size`` at a time."""
        self.load()
        features = []
        for start in range(0, len(images), batch_size):
            batch = [self._preprocess(image.convert("RGB")) for image in images[start : start + batch_size]]
            pixels = torch.stack(batch).to(self.device, self.dtype)
            features.append(normalize(self._model.encode_image(pixels).float(), dim=-1))
        return torch.cat(features)

    @torch.no_grad()
    def texts(self, texts: Sequence[str], batch_size: int) -> torch.Tensor:
        """Unit features (n, C) float32 of ``texts``; each text is encoded once per process."""
        self.load()
        with self._lock:
            new = [text for text in dict.fromkeys(texts) if text not in self._texts]
            for start in range(0, len(new), batch_size):
                batch = new[start : start + batch_size]
                features = normalize(self._model.encode_text(self._tokenize(batch).to(self.device)).float(), dim=-1)
                self._texts.update(zip(batch, features, strict=True))
            return torch.stack([self._texts[text] for text in texts])


_shared = cache(OpenClip)


def open_clip_model(
    model: str, pretrained: str | None, device: torch.device | str, dtype: str = "float32"
) -> OpenClip:
    """The process's one model of these weights on this device.

    Raises:
        ImportError: open_clip is not installed (reported when the reward is built, not at the first image).
    """
    import open_clip  # noqa: F401

    return _shared(model, pretrained, torch.device(device), dtype)


class SubfigClipT:
    """Mean cosine similarity of each sub-figure with its own panel text."""

    def __init__(self, clip: OpenClip, batch_size: int) -> None:
        self.clip, self.batch_size, self.check = clip, batch_size, clip.load

    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64 in [−1, 1]."""
        grids = [split_prompt(item.prompt) for item in items]
        cells = [cell for image, g in zip(images, grids, strict=True) for cell in split_image(image, g.rows, g.cols)]
        texts = [text for grid in grids for text in grid.panels]
        cosines = self.clip.images(cells, self.batch_size) * self.clip.texts(texts, self.batch_size)
        cosines = cosines.sum(dim=-1).double().cpu().numpy()
        by_image = np.split(cosines, np.cumsum([len(grid.panels) for grid in grids])[:-1])
        return np.array([part.mean() for part in by_image])


def subfig_clipT(
    model: str = OPEN_CLIP,
    pretrained: str | None = OPEN_CLIP_WEIGHTS,
    device: torch.device | str = "cpu",
    batch_size: int = 32,
    dtype: str = "float32",
) -> SubfigClipT:
    """Does each sub-figure show its own panel text? (arXiv 2512.04784, §5)

    Args:
        model, pretrained: OpenCLIP architecture, and the tag or a local file of its weights.
        device, batch_size: Where it computes, and how many sub-figures (texts) at once.
        dtype: Of its weights; float16 takes half the memory and rounds scores by about 1e-3.

    Raises:
        ImportError: open_clip is not installed.
    """
    return SubfigClipT(open_clip_model(model, pretrained, device, dtype), batch_size)


def subfig_clipI(
    model: str = OPEN_CLIP,
    pretrained: str | None = OPEN_CLIP_WEIGHTS,
    device: torch.device | str = "cpu",
    batch_size: int = 32,
    dtype: str = "float32",
) -> SubfigurePairs:
    """How similar are the sub-figures to each other? Arguments and model as in ``subfig_clipT``."""
    clip = open_clip_model(model, pretrained, device, dtype)
    return SubfigurePairs("subfig_clipI", lambda images: clip.images(images, batch_size), clip.load)


subfig_clipI.check_item = lambda item, kwargs: check_panels(item, "subfig_clipI")
