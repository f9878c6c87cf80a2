"""What pickscore and clipscore share: logit_scale · cos(image, prompt) of a CLIP model, divided by a scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from PIL import Image

    from paco_grpo.types import Item


class ClipTextImage:
    """Whole image against whole prompt; loads the model at the first call, keeps the features of prompts.

    Args:
        model: Hub name or folder of the CLIP model.
        processor: Hub name or folder of its processor.
        scale: What scores are divided by.
        device: Where it computes.
        batch_size: Images per forward.
    """

    def __init__(self, model: str, processor: str, scale: float, device: torch.device | str, batch_size: int) -> None:
        self.name, self.processor_name, self.scale = model, processor, scale
        self.device, self.batch_size = torch.device(device), batch_size
        self._model = None
        self._texts: dict[str, torch.Tensor] = {}

    def load(self) -> None:
        """Load the model (downloads it when it is not in the cache)."""
        if self._model is None:
            from transformers import CLIPModel, CLIPProcessor

            self._processor = CLIPProcessor.from_pretrained(self.processor_name)
            self._model = CLIPModel.from_pretrained(self.name).eval().requires_grad_(False).to(self.device)

    @torch.no_grad()
    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64."""
        self.load()
        scores = []
        for start in range(0, len(images), self.batch_size):
            batch = [image.convert("RGB") for image in images[start : start + self.batch_size]]
            pixels = self._processor(images=batch, return_tensors="pt")["pixel_values"].to(self.device)
            vision = self._model.vision_model(pixel_values=pixels).pooler_output
            features = torch.nn.functional.normalize(self._model.visual_projection(vision), dim=-1)
            texts = torch.stack([self._text(item.prompt) for item in items[start : start + self.batch_size]])
            scores.append((self._model.logit_scale.exp() * (features * texts).sum(dim=-1)).double().cpu().numpy())
        return np.concatenate(scores) / self.scale

    def _text(self, prompt: str) -> torch.Tensor:
        if prompt not in self._texts:
            tokens = self._processor(text=[prompt], truncation=True, max_length=77, return_tensors="pt").to(self.device)
            output = self._model.text_model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
            features = self._model.text_projection(output.pooler_output)[0]
            self._texts[prompt] = torch.nn.functional.normalize(features, dim=-1)
        return self._texts[prompt]
