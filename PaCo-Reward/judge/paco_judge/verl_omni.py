"""The judge as a reward function of verl-omni (docs/other-trainers.md)."""

import asyncio
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from paco_judge.client import DEFAULT_MODEL
from paco_judge.grid import index_pairs, split_image, split_prompt
from paco_judge.images import load_image, read_image
from paco_judge.judge import Judge
from paco_judge.questions import Pair, theme_question
from paco_judge.verdict import mean_score

_judge = cache(Judge)


async def consistency(
    data_source: str,
    solution_image: Any,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    base_url: str = "http://127.0.0.1:8000",
    model: str = DEFAULT_MODEL,
) -> dict[str, float]:
    """``{"score": …}`` in [0, 1], as PaCo-GRPO's consistency_for_editing or consistency_score.

    Args:
        data_source: Not read.
        solution_image: Array or tensor (C, H, W), or (N, C, H, W) of which the first counts: uint8,
            or floats in [0, 1].
        ground_truth: The prompt, of a grid of sub-figures.
        extra_info: Of an edit, ``source_img`` and ``instruction`` (default: the prompt).
        base_url, model: The judge's server, and the name under which it serves the judge.

    Raises:
        ValueError: The prompt is of no grid.
        RuntimeError: The judge gave no score, which must not count as 0.
    """
    judge = _judge(base_url, model)
    score = await asyncio.to_thread(
        _score, judge, _picture(solution_image), ground_truth, extra_info or {}
    )
    if score is None:
        raise RuntimeError(f"{judge.name} gave no score for {ground_truth!r}; the log says why")
    return {"score": score}


def _score(judge: Judge, image: Image.Image, prompt: str, extra: Mapping[str, Any]) -> float | None:
    if extra.get("source_img") is not None:
        instruction = extra.get("instruction") or prompt
        return judge.score_edit(_picture(extra["source_img"]), image, instruction)
    grid = split_prompt(prompt)
    cells = split_image(image, grid.rows, grid.cols)
    if len(cells) < 2:
        raise ValueError(f"the prompt states no grid of sub-figures: {prompt!r}")
    question = theme_question(grid.theme)
    pairs = [Pair(cells[i], cells[j], question) for i, j in index_pairs(len(cells))]
    return mean_score(judge.verdicts(pairs))


def _picture(image: Any) -> Image.Image:
    """Of an array or tensor, a picture, a file, or a cell of a parquet table."""
    if isinstance(image, Mapping):
        return read_image(image.get("bytes") or image["path"])
    if isinstance(image, str | Image.Image):
        return load_image(image)
    pixels = np.asarray(image)
    if pixels.ndim == 4:
        pixels = pixels[0]
    if pixels.dtype.kind == "f":
        pixels = (pixels * 255).round().clip(0, 255)
    return Image.fromarray(np.moveaxis(pixels, 0, -1).astype(np.uint8))
