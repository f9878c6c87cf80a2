"""CLIP rewards: whole image against whole prompt (pickscore, clipscore), sub-figures (subfig_clipT, subfig_clipI)."""

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from unittest import mock

import numpy as np
import torch
from httpx import HTTPError
from huggingface_hub import constants, get_session
from PIL import Image
from torch.nn.functional import normalize

from paco_grpo.item import Item
from paco_grpo.rewards.errors import RewardError
from paco_grpo.rewards.registry import Reward
from paco_grpo.rewards.subfigures import check_panels, mean_over_pairs
from paco_judge.grid import split_image, split_prompt
from paco_judge.weights import from_pretrained_strict

PICKSCORE, PICKSCORE_PROCESSOR = (
    "yuvalkirstain/PickScore_v1",
    "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
)
CLIPSCORE = "openai/clip-vit-large-patch14"
OPEN_CLIP, OPEN_CLIP_WEIGHTS = "ViT-H-14", "laion2b_s32b_b79k"


def download(load: Callable[[], object]) -> None:
    """Load a model once, so that its weights are in the cache. Raises SystemExit."""
    try:
        load()
    except RewardError as error:
        raise SystemExit(f"error: {error}") from error
    print("the weights are in the cache")


def _hub_is_away() -> bool:
    """Ask the hub once; where it does not answer, its own downloads try again for minutes."""
    try:
        get_session().head(constants.ENDPOINT, timeout=10.0)
    except (OSError, HTTPError):
        return True
    return False


class Clip:
    """Unit features of images and texts; features of texts are kept. Safe for several threads.

    Subclasses define ``open``, which returns the model, and ``encode_images`` and ``encode_texts``, which return features
    (n, C) that need not be unit vectors.
    """

    what, command = "", ""  # the weights, and how they are downloaded

    def __init__(self, device: torch.device | str, dtype: str) -> None:
        if dtype not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"dtype {dtype!r} is not float32, float16 or bfloat16")
        self.device, self.dtype = torch.device(device), getattr(torch, dtype)
        self._model: torch.nn.Module | None = None
        self._texts: dict[str, torch.Tensor] = {}
        self._lock = threading.RLock()

    def load(self) -> None:
        """Load the model, if it is not loaded. Raises RewardError."""
        with self._lock:
            if self._model is None:
                try:
                    with mock.patch.object(constants, "HF_HUB_OFFLINE", _hub_is_away()):
                        model = self.open()
                except Exception as error:  # hub and network errors share no class
                    raise RewardError(
                        f"CLIP model {self.what} cannot be loaded ({type(error).__name__}: {error}). If its weights are "
                        f"absent, run `{self.command}` where there is a network and copy its cache (HF_HOME), or set "
                        "HF_ENDPOINT to a mirror"
                    ) from error
                self._model = model.eval().requires_grad_(False).to(self.device, self.dtype)

    @torch.no_grad()
    def images(self, images: Sequence[Image.Image], batch_size: int) -> torch.Tensor:
        """(n, C) float32, ``batch_size`` images at a time."""
        self.load()
        batches = [
            images[start : start + batch_size] for start in range(0, len(images), batch_size)
        ]
        found = [self.encode_images([image.convert("RGB") for image in batch]) for batch in batches]
        return torch.cat([normalize(features.float(), dim=-1) for features in found])

    @torch.no_grad()
    def texts(self, texts: Sequence[str], batch_size: int = 1) -> torch.Tensor:
        """(n, C) float32."""
        self.load()
        with self._lock:
            new = [text for text in dict.fromkeys(texts) if text not in self._texts]
            for start in range(0, len(new), batch_size):
                batch = new[start : start + batch_size]
                self._texts |= zip(
                    batch, normalize(self.encode_texts(batch).float(), dim=-1), strict=True
                )
            return torch.stack([self._texts[text] for text in texts])


class ClipScore(Clip):
    """logit_scale · cos(image, prompt) / scale of a transformers CLIP model.

    Args:
        model, processor: Hub name or folder; the default processor is the model's.
        scale: About the largest score in practice; 30 as in Flow-GRPO's released code.
        dtype: float16 takes half the memory and rounds scores by about 1e-3.
    """

    def __init__(
        self,
        model: str = CLIPSCORE,
        processor: str | None = None,
        scale: float = 30.0,
        device: torch.device | str = "cpu",
        batch_size: int = 8,
        dtype: str = "float32",
    ) -> None:
        super().__init__(device, dtype)
        self.what, self.processor_name, self.scale, self.batch_size = (
            model,
            processor or model,
            scale,
            batch_size,
        )
        self.command = (
            "python paco_grpo/rewards/pickscore_scores.py"
            if model == PICKSCORE
            else f"hf download {model}"
        )
        self.check = self.load

    def open(self) -> torch.nn.Module:
        from transformers import CLIPModel, CLIPProcessor

        self._processor = CLIPProcessor.from_pretrained(self.processor_name)
        return from_pretrained_strict(CLIPModel, self.what)

    def encode_images(self, images: list[Image.Image]) -> torch.Tensor:
        pixels = self._processor(images=images, return_tensors="pt")["pixel_values"].to(
            self.device, self.dtype
        )
        return self._model.visual_projection(
            self._model.vision_model(pixel_values=pixels).pooler_output
        )

    def encode_texts(self, texts: list[str]) -> torch.Tensor:
        tokens = self._processor(
            text=texts, truncation=True, max_length=77, return_tensors="pt"
        ).to(self.device)
        output = self._model.text_model(
            input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
        )
        return self._model.text_projection(output.pooler_output)

    @torch.no_grad()
    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64."""
        cosines = (
            self.images(images, self.batch_size) * self.texts([item.prompt for item in items])
        ).sum(dim=-1)
        return (self._model.logit_scale.float().exp() * cosines).double().cpu().numpy() / self.scale


# Human preference for an image given its prompt (Pick-a-Pic, arXiv 2305.01569): logit_scale · cos / 26.
PickScore = partial(ClipScore, model=PICKSCORE, processor=PICKSCORE_PROCESSOR, scale=26.0)


class OpenClip(Clip):
    """A model of the package open_clip. Raises ImportError without the package, before weights are loaded."""

    command = "python paco_grpo/rewards/subfig_clipT.py"

    def __init__(
        self, model: str, pretrained: str | None, device: torch.device | str, dtype: str
    ) -> None:
        import open_clip  # noqa: F401

        super().__init__(device, dtype)
        self.name, self.pretrained, self.what = model, pretrained, f"{model} ({pretrained})"

    def open(self) -> torch.nn.Module:
        import open_clip

        options = {"pretrained": self.pretrained, "device": self.device}
        model, _, self._preprocess = open_clip.create_model_and_transforms(self.name, **options)
        self._tokenize = open_clip.get_tokenizer(self.name)
        return model

    def encode_images(self, images: list[Image.Image]) -> torch.Tensor:
        pixels = torch.stack([self._preprocess(image) for image in images])
        return self._model.encode_image(pixels.to(self.device, self.dtype))

    def encode_texts(self, texts: list[str]) -> torch.Tensor:
        return self._model.encode_text(self._tokenize(texts).to(self.device))


open_clip_model = cache(OpenClip)  # one for all rewards of a process


def _sub_figure_reward(
    compare: Callable[[Clip, int], Reward],
    model: str = OPEN_CLIP,
    pretrained: str | None = OPEN_CLIP_WEIGHTS,
    device: torch.device | str = "cpu",
    batch_size: int = 32,
    dtype: str = "float32",
) -> Reward:
    """A reward of sub-figures by their OpenCLIP features.

    Args:
        compare: (model, ``batch_size``) → the reward.
        pretrained: OpenCLIP's tag, or a local file, of the weights.
        batch_size: Sub-figures (texts) at once.
        dtype: See ``ClipScore``.
    """
    clip = open_clip_model(model, pretrained, torch.device(device), dtype)
    score = compare(clip, batch_size)
    score.check = clip.load
    return score


def _with_panels(clip: Clip, batch_size: int) -> Reward:
    """Mean cosine of each sub-figure with its own panel text (arXiv 2512.04784, §5), in [−1, 1]."""

    def score(images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        grids = [split_prompt(item.prompt) for item in items]
        cells = [
            cell
            for image, g in zip(images, grids, strict=True)
            for cell in split_image(image, g.rows, g.cols)
        ]
        texts = [text for grid in grids for text in grid.panels]
        cosines = (
            (clip.images(cells, batch_size) * clip.texts(texts, batch_size))
            .sum(dim=-1)
            .double()
            .cpu()
            .numpy()
        )
        by_image = np.split(cosines, np.cumsum([len(grid.panels) for grid in grids])[:-1])
        return np.array([part.mean() for part in by_image])

    return score


def _with_each_other(clip: Clip, batch_size: int) -> Reward:
    return mean_over_pairs("subfig_clipI", lambda images: clip.images(images, batch_size))


subfig_clipT = partial(_sub_figure_reward, _with_panels)
subfig_clipI = partial(_sub_figure_reward, _with_each_other)
subfig_clipI.check_item = lambda item, kwargs: check_panels(item, "subfig_clipI")
