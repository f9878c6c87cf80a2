"""Features of an epoch's images, for the advantages that keep the images of a prompt apart (``advantages.diversity``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image

from paco_grpo.distributed.processes import gather_rows
from paco_grpo.options.schema import TrainOptions
from paco_grpo.rewards.clip import clipscore

LATENTS = "latents"


class GroupFeatures:
    """``train.diversity_features`` of the images that this process samples.

    Args:
        options: ``config.train``.
        device: Of the CLIP model; loaded here, so that a missing one is found before training.
    """

    def __init__(self, options: TrainOptions, device: torch.device) -> None:
        self._rows: dict[int, np.ndarray] = {}
        self.clip = None
        if options.diversity_features != LATENTS:
            self.clip = clipscore(options.diversity_features, device=device)
            self.clip.load()

    def add(self, images: Sequence[Image.Image | None], numbers: Sequence[int]) -> None:
        """The images of the samples ``numbers``; those of None, which have no reward, are NaN."""
        if self.clip is None:
            return
        present = [(n, image) for n, image in zip(numbers, images, strict=True) if image is not None]
        features = self.clip.image_features([image for _, image in present]) if present else ()
        self._rows |= {n: row.cpu().numpy().astype(np.float64) for (n, _), row in zip(present, features, strict=True)}

    def gathered(self, clean_latents: Sequence[torch.Tensor], total: int, accelerator: Accelerator) -> np.ndarray:
        """(total, d) float64 of all processes by global position; a collective operation. Forgets the epoch's images.

        Args:
            clean_latents: (1, N, C) of each sample of this process. Sizes may differ between prompts: shorter rows end in 0.
        """
        rows = self._rows
        if self.clip is None:
            rows = {n: x.flatten().double().cpu().numpy() for n, x in enumerate(clean_latents)}
        width = int(accelerator.gather(torch.tensor([max(map(len, rows.values()), default=0)], device=accelerator.device)).max())
        local = np.full((len(clean_latents), width), np.nan)
        for number, row in rows.items():
            local[number] = np.pad(row, (0, width - len(row)))
        self._rows = {}
        return gather_rows(accelerator, local, total)
