"""CLIP rewards: whole image against whole prompt (pickscore, clipscore), panels (subfig_clipT,
subfig_clipI), and an edit against what it edits (reference_clipI).
"""

import importlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import normalize
from typing_extensions import override

from paco_grpo.item import Item
from paco_grpo.rewards.contract import ScoreFn, with_attributes
from paco_grpo.rewards.judge import check_references
from paco_grpo.rewards.subfigures import grid_of, mean_over_pairs
from paco_judge.encoders import OPEN_CLIP, OPEN_CLIP_WEIGHTS, open_clip_encoder
from paco_judge.errors import UserError
from paco_judge.grid import split_image, split_prompt
from paco_judge.weights import explain_missing, from_pretrained_strict

PICKSCORE = "yuvalkirstain/PickScore_v1"
PICKSCORE_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
CLIPSCORE = "openai/clip-vit-large-patch14"
CLIP_TOKENS = 77  # of a text, with its first and last one; the rest is not read


class Clip(ABC):
    """Unit features of images and texts; features of texts are kept. Safe for several threads."""

    command = ""  # which downloads the weights

    def __init__(self, device: torch.device | str, dtype: str) -> None:
        self.device = torch.device(device)
        self.dtype = getattr(torch, dtype)
        self._model: Any = None  # of a library, once it is loaded
        self._texts: dict[str, torch.Tensor] = {}
        self._lock = threading.RLock()

    @abstractmethod
    def open(self) -> torch.nn.Module:
        """Load the model from its files."""

    @abstractmethod
    def encode_images(self, images: list[Image.Image]) -> torch.Tensor:
        """Features (n, C) of RGB images, of any length."""

    @abstractmethod
    def encode_texts(self, texts: list[str]) -> torch.Tensor:
        """Features (n, C), of any length."""

    @abstractmethod
    def num_read(self, text: str) -> int | None:
        """How many tokens the model reads of a text that is longer, else None."""

    def remark_on(self, texts: Sequence[str]) -> str | None:
        """A remark on a prompt whose ``texts`` the model does not read whole, or None."""
        self.load()
        for text in texts:
            most = self.num_read(text)
            if most is not None:
                return f"are longer than the {most} tokens that it reads"
        return None

    def load(self) -> None:
        """Load the model, if it is not loaded. Raises UserError."""
        with self._lock:
            if self._model is not None:
                return
            try:
                model = self.open()
            except Exception as error:  # of transformers, open_clip and safetensors
                raise UserError(f"{error} To download all of it: `{self.command}`") from error
            self._model = model.eval().requires_grad_(False).to(self.device, self.dtype)

    @torch.no_grad()
    def images(self, images: Sequence[Image.Image], batch_size: int) -> torch.Tensor:
        """(n, C) float32, ``batch_size`` images at a time."""
        self.load()
        batches = []
        for start in range(0, len(images), batch_size):
            batch = [image.convert("RGB") for image in images[start : start + batch_size]]
            features = self.encode_images(batch)
            batches.append(normalize(features.float(), dim=-1))
        return torch.cat(batches)

    @torch.no_grad()
    def texts(self, texts: Sequence[str], batch_size: int = 1) -> torch.Tensor:
        """(n, C) float32."""
        self.load()
        with self._lock:
            new = [text for text in dict.fromkeys(texts) if text not in self._texts]
            for start in range(0, len(new), batch_size):
                batch = new[start : start + batch_size]
                features = normalize(self.encode_texts(batch).float(), dim=-1)
                self._texts |= zip(batch, features, strict=True)
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
        self.model_name = model
        self.processor_name = processor or model
        self.scale = scale
        self.batch_size = batch_size
        self.command = f"hf download {model}"
        if model == PICKSCORE:
            self.command = "python paco_grpo/rewards/pickscore_scores.py"
        self.check = self.load
        # No method, because this class is the factory, also of a reward in another process.
        self.remark = lambda item: self.remark_on([item.prompt])

    @override
    def open(self) -> torch.nn.Module:
        from transformers import CLIPModel, CLIPProcessor

        with explain_missing(self.processor_name):
            self._processor: Any = CLIPProcessor.from_pretrained(self.processor_name)
        return from_pretrained_strict(CLIPModel, self.model_name)

    @override
    def encode_images(self, images: list[Image.Image]) -> torch.Tensor:
        inputs = self._processor(images=images, return_tensors="pt")
        pixels = inputs["pixel_values"].to(self.device, self.dtype)
        output = self._model.vision_model(pixel_values=pixels)
        return self._model.visual_projection(output.pooler_output)

    @override
    def encode_texts(self, texts: list[str]) -> torch.Tensor:
        inputs = self._processor(
            text=texts, truncation=True, max_length=CLIP_TOKENS, return_tensors="pt"
        )
        tokens = inputs.to(self.device)
        output = self._model.text_model(
            input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
        )
        return self._model.text_projection(output.pooler_output)

    @override
    def num_read(self, text: str) -> int | None:
        tokens = self._processor.tokenizer(text, verbose=False)["input_ids"]
        return CLIP_TOKENS if len(tokens) > CLIP_TOKENS else None

    @torch.no_grad()
    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64."""
        image_features = self.images(images, self.batch_size)
        text_features = self.texts([item.prompt for item in items])
        cosines = (image_features * text_features).sum(dim=-1)
        scores = self._model.logit_scale.float().exp() * cosines
        return scores.double().cpu().numpy() / self.scale


# Human preference for an image given its prompt (Pick-a-Pic, arXiv 2305.01569).
PickScore = partial(ClipScore, model=PICKSCORE, processor=PICKSCORE_PROCESSOR, scale=26.0)


class OpenClip(Clip):
    """A model of the package open_clip.

    Raises ImportError without the package, before weights are loaded.
    """

    command = "python paco_grpo/rewards/subfig_clipT.py"

    def __init__(
        self, model: str, pretrained: str | None, device: torch.device | str, dtype: str
    ) -> None:
        importlib.import_module("open_clip")
        super().__init__(device, dtype)
        self.name = model
        self.pretrained = pretrained

    @override
    def open(self) -> torch.nn.Module:
        import open_clip

        encoder = open_clip_encoder(str(self.device), self.name, self.pretrained)
        self._preprocess = encoder.preprocess
        self._tokenize: Any = open_clip.get_tokenizer(self.name)
        return encoder.model

    @override
    def encode_images(self, images: list[Image.Image]) -> torch.Tensor:
        pixels = torch.stack([self._preprocess(image) for image in images])
        return self._model.encode_image(pixels.to(self.device, self.dtype))

    @override
    def encode_texts(self, texts: list[str]) -> torch.Tensor:
        return self._model.encode_text(self._tokenize(texts).to(self.device))

    @override
    def num_read(self, text: str) -> int | None:
        most = self._tokenize.context_length
        with_one_more = self._tokenize([text, ""], context_length=most + 1)
        last_of_text, padding = with_one_more[:, -1]
        return most if last_of_text != padding else None


open_clip_model = cache(OpenClip)  # one for all rewards of a process


def _open_clip_reward(
    compare: Callable[[Clip, int], ScoreFn],
    model: str = OPEN_CLIP,
    pretrained: str | None = OPEN_CLIP_WEIGHTS,
    device: torch.device | str = "cpu",
    batch_size: int = 32,
    dtype: str = "float32",
) -> ScoreFn:
    """A reward of images or panels by their OpenCLIP features.

    Args:
        compare: (model, ``batch_size``) → the score function.
        pretrained: OpenCLIP's tag, or a local file, of the weights.
        batch_size: Panels (texts) at once.
        dtype: See ``ClipScore``.
    """
    clip = open_clip_model(model, pretrained, torch.device(device), dtype)
    return with_attributes(compare(clip, batch_size), check=clip.load)


def _with_panels(clip: Clip, batch_size: int) -> ScoreFn:
    """Mean cosine of each panel with its own text (arXiv 2512.04784, §5), in [−1, 1]."""

    def score(images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        panels = []
        texts = []
        ends = []  # of each image's panels
        for image, item in zip(images, items, strict=True):
            grid = split_prompt(item.prompt)
            panels += split_image(image, grid.rows, grid.cols)
            texts += grid.panels
            ends.append(len(texts))
        features = clip.images(panels, batch_size)
        cosines = (features * clip.texts(texts, batch_size)).sum(dim=-1).double().cpu().numpy()
        return np.array([part.mean() for part in np.split(cosines, ends[:-1])])

    return with_attributes(
        score, remark=lambda item: clip.remark_on(split_prompt(item.prompt).panels)
    )


def _with_each_other(clip: Clip, batch_size: int) -> ScoreFn:
    return mean_over_pairs("subfig_clipI", lambda images: clip.images(images, batch_size))


def _with_references(clip: Clip, batch_size: int) -> ScoreFn:
    """Mean cosine of an edited image with its reference images (``Item.crops``), in [−1, 1]."""

    def score(images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        scores = []
        for image, item in zip(images, items, strict=True):
            edited, *references = clip.images([image, *item.crops], batch_size)
            cosines = [float(edited @ reference) for reference in references]
            scores.append(np.mean(cosines))
        return np.array(scores)

    return score


subfig_clipT = partial(_open_clip_reward, _with_panels)
subfig_clipI = partial(_open_clip_reward, _with_each_other)
reference_clipI = partial(_open_clip_reward, _with_references)
with_attributes(reference_clipI, check_item=lambda item: check_references(item, "reference_clipI"))
with_attributes(subfig_clipI, check_item=lambda item: grid_of(item, "subfig_clipI"))
