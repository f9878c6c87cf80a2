"""The judge as a reward function of verl-omni (docs/other-trainers.md)."""

import asyncio
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

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
    model: str | None = None,
) -> dict[str, float]:
    """``{"score": …}`` in [0, 1], as PaCo-GRPO's consistency_for_editing or consistency_score.

    Args:
        data_source: Not read.
        solution_image: Array or tensor (3, H, W) or (H, W, 3), or several of which the first counts
            (N, …): uint8, or floats in [0, 1].
        ground_truth: The prompt, of a grid of panels.
        extra_info: Of an edit, ``source_img`` and ``instruction`` (default: the prompt).
        base_url, model: The judge's server, and the name under which it serves the judge (default:
            PaCo-Reward-7B, or its only model).

    Raises:
        ValueError: The prompt is of no grid, or the image is no picture.
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
    panels = split_image(image, grid.rows, grid.cols)
    if len(panels) < 2:
        hint = ""
        if "instruction" in extra:
            hint = "; an edit needs source_img in its extra_info (docs/other-trainers.md)"
        raise ValueError(f"the prompt states no grid of panels: {prompt!r}{hint}")
    question = theme_question(grid.theme)
    pairs = [Pair(panels[i], panels[j], question) for i, j in index_pairs(len(panels))]
    return mean_score(judge.verdicts(pairs))


def _picture(image: Any) -> Image.Image:
    """Of an array or tensor, a picture, a file, or a cell of a parquet table."""
    if isinstance(image, Mapping):
        return read_image(image.get("bytes") or image["path"])
    if isinstance(image, str | Image.Image):
        return load_image(image)
    pixels = _array(image)
    shape = pixels.shape
    if pixels.ndim == 4 and len(pixels):
        pixels = pixels[0]
    if pixels.ndim != 3 or 3 not in (pixels.shape[0], pixels.shape[-1]) or not pixels.size:
        raise ValueError(f"an image must be (3, H, W) or (H, W, 3), got {shape}")
    if pixels.shape[0] == 3:
        pixels = np.moveaxis(pixels, 0, -1)
    if pixels.dtype.kind == "f":
        pixels = _to_bytes(pixels)
    if pixels.dtype != np.uint8:
        raise ValueError(f"an image must be of uint8 or of floats in [0, 1], got {pixels.dtype}")
    return Image.fromarray(np.ascontiguousarray(pixels))


def _array(image: Any) -> np.ndarray:
    """Of an array, or of a tensor on any device; NumPy has no bfloat16."""
    if hasattr(image, "detach"):
        image = image.detach().cpu()
        image = image.float() if image.is_floating_point() else image
    return np.asarray(image)


def _to_bytes(pixels: np.ndarray) -> np.ndarray:
    """Floats in [0, 1] as uint8. Raises ValueError: They are others; a judge would score them."""
    if not np.isfinite(pixels).all():
        raise ValueError("an image has values that are not finite: the generator is broken")
    levels = (pixels.astype(np.float64) * 255).round()
    if levels.min() < 0 or levels.max() > 255:
        raise ValueError(
            f"an image of floats must be in [0, 1], got {pixels.min():.4g} to {pixels.max():.4g}"
        )
    return levels.astype(np.uint8)
