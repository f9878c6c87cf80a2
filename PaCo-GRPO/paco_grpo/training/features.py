"""Features of an epoch's images, for the advantages that keep the images of a prompt apart (``advantages.diversity``)."""

from collections.abc import Sequence

import numpy as np
import torch
from accelerate.utils import gather_object
from PIL import Image

from paco_grpo.options.schema import TrainOptions
from paco_grpo.rewards.clip import ClipScore


class GroupFeatures:
    """``train.diversity_features`` of the images that this process samples."""

    def __init__(self, options: TrainOptions, device: torch.device) -> None:
        self._rows: dict[int, np.ndarray] = {}
        self.clip = None
        if options.diversity_features != "latents":
            self.clip = ClipScore(options.diversity_features, device=device)
            self.clip.load()  # a missing one is found before training

    def add(self, images: Sequence[Image.Image | None], numbers: Sequence[int]) -> None:
        """Take in the images of the samples ``numbers``; one that is None has NaN as features."""
        present = [
            (n, image) for n, image in zip(numbers, images, strict=True) if image is not None
        ]
        if self.clip is not None and present:
            features = self.clip.images([image for _, image in present], len(present))
            self._rows |= {
                n: row.double().cpu().numpy() for (n, _), row in zip(present, features, strict=True)
            }

    def gathered(self, clean_latents: Sequence[torch.Tensor], total: int) -> np.ndarray:
        """(total, d) float64 of all processes by global position, a collective operation; shorter rows end in 0.

        ``clean_latents`` are (1, N, C) of each sample of this process.
        """
        rows, self._rows = self._rows, {}
        if self.clip is None:
            rows = {n: x.flatten().double().cpu().numpy() for n, x in enumerate(clean_latents)}
        everyone = gather_object([rows])
        width = max((len(row) for rows in everyone for row in rows.values()), default=0)
        result = np.full((total, width), np.nan)
        for rank, rows in enumerate(everyone):
            for number, row in rows.items():
                result[rank + number * len(everyone)] = np.pad(row, (0, width - len(row)))
        return result
