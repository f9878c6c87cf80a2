"""One OpenCLIP model for all rewards of a process that name the same weights; features of texts are kept."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from PIL import Image

MODEL, WEIGHTS = "ViT-H-14", "laion2b_s32b_b79k"


class OpenClip:
    """Loads the model at the first use. Safe for several reward threads.

    Args:
        model: OpenCLIP architecture.
        pretrained: OpenCLIP tag, or a local file of weights.
        device: Where it computes.
    """

    def __init__(self, model: str, pretrained: str | None, device: torch.device) -> None:
        self.name, self.pretrained, self.device = model, pretrained, device
        self._model = None
        self._texts: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()

    def load(self) -> None:
        """Load the model (downloads it when it is not in the cache).

        Raises:
            RuntimeError: Without weights: unknown architecture or tag, or no way to download them.
        """
        with self._lock:
            if self._model is None:
                import open_clip

                model, _, self._preprocess = open_clip.create_model_and_transforms(
                    self.name, pretrained=self.pretrained, device=self.device
                )
                self._tokenize = open_clip.get_tokenizer(self.name)
                self._model = model.eval().requires_grad_(False)

    @torch.no_grad()
    def images(self, images: Sequence[Image.Image], batch_size: int) -> torch.Tensor:
        """Unit features (n, C) float32 of ``images``, ``batch_size`` at a time."""
        self.load()
        features = []
        for start in range(0, len(images), batch_size):
            batch = [self._preprocess(image.convert("RGB")) for image in images[start : start + batch_size]]
            features.append(self._model.encode_image(torch.stack(batch).to(self.device), normalize=True))
        return torch.cat(features)

    @torch.no_grad()
    def texts(self, texts: Sequence[str], batch_size: int) -> torch.Tensor:
        """Unit features (n, C) float32 of ``texts``; each text is computed once in the life of the process."""
        self.load()
        with self._lock:
            new = [text for text in dict.fromkeys(texts) if text not in self._texts]
            for start in range(0, len(new), batch_size):
                batch = new[start : start + batch_size]
                features = self._model.encode_text(self._tokenize(batch).to(self.device), normalize=True)
                self._texts.update(zip(batch, features, strict=True))
            return torch.stack([self._texts[text] for text in texts])


@cache
def _shared(model: str, pretrained: str | None, device: str) -> OpenClip:
    return OpenClip(model, pretrained, torch.device(device))


def open_clip_model(model: str, pretrained: str | None, device: torch.device | str) -> OpenClip:
    """The process's one model of these weights on this device.

    Raises:
        ImportError: open_clip is not installed (said at once, not at the first image).
    """
    import open_clip  # noqa: F401

    return _shared(model, pretrained, str(device))
