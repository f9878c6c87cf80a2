"""Features of an epoch's images, for ``advantages.diversity``."""

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
        if self.clip is None:
            return
        present = {n: image for n, image in zip(numbers, images, strict=True) if image is not None}
        if not present:
            return
        features = self.clip.images(list(present.values()), len(present))
        for number, row in zip(present, features, strict=True):
            self._rows[number] = row.double().cpu().numpy()

    def gathered(self, clean_latents: Sequence[torch.Tensor], total: int) -> np.ndarray:
        """(total, d) float64 of all processes by position; shorter rows end in 0.

        This is a collective operation.

        ``clean_latents`` are (1, L, C) of each sample of this process.
        """
        local = self._rows
        self._rows = {}
        if self.clip is None:
            for number, latents in enumerate(clean_latents):
                local[number] = latents.flatten().double().cpu().numpy()
        rows_of_processes = gather_object([local])
        row_at = {}
        for process, rows in enumerate(rows_of_processes):
            for number, row in rows.items():
                position = process + number * len(rows_of_processes)
                row_at[position] = row
        width = max((len(row) for row in row_at.values()), default=0)
        features = np.full((total, width), np.nan)
        for position, row in row_at.items():
            features[position] = np.pad(row, (0, width - len(row)))
        return features
