"""ocr: is the text that the prompt asks for in the image? (Flow-GRPO, arXiv 2505.05470, §5.1)

The text in double quotes in the prompt is compared with what a reader finds. RapidOCR (PP-OCR on ONNX Runtime, weights in
the package) reads in this process; PaddleOCR, with which older numbers were computed, in a separate environment
(``bash scripts/reward_service.sh ocr``), because it needs an older numpy.
"""

import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from PIL import Image

from paco_grpo.item import Item
from paco_grpo.rewards.registry import Reward

Reader = Callable[[Image.Image], str]

_QUOTED = re.compile(r'"([^"]+)"|“([^”]+)”')


def wanted_text(prompt: str) -> str:
    """The text in the first pair of double quotes. Raises ValueError: There is none."""
    match = _QUOTED.search(prompt)
    text = (match[1] or match[2]) if match else ""
    if not text.strip():
        raise ValueError(
            f"ocr needs the wanted text in double quotes in the prompt, got {prompt!r}"
        )
    return text


def text_score(wanted: str, read: str) -> float:
    """1 − min(edit distance, len) / len in [0, 1], spaces and case ignored; 1 if ``wanted`` is contained in ``read``."""
    from rapidfuzz.distance import Levenshtein

    wanted, read = ("".join(text.split()).casefold() for text in (wanted, read))
    if wanted in read:
        return 1.0
    return 1.0 - min(Levenshtein.distance(wanted, read), len(wanted)) / len(wanted)


def ocr(threads: int = 4, lang: str = "en", device: Any = "cpu") -> Reward:
    """Text in the image against that in the prompt, read by PaddleOCR where only that is installed, else by RapidOCR.

    Args:
        threads: Upper limit of RapidOCR's threads (also of OpenCV's in this process). It computes on the CPU.
        lang: Language of PaddleOCR's recognizer. RapidOCR's reads English and Chinese.
        device: Of PaddleOCR.
    """
    # A missing package is reported here, before training; models are loaded at the first image.
    import rapidfuzz  # noqa: F401

    load = partial(_paddleocr, lang, str(device).startswith("cuda"))
    if importlib.util.find_spec("rapidocr") or not importlib.util.find_spec("paddleocr"):
        import rapidocr  # noqa: F401

        load = partial(_rapidocr, threads)

    def score(images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        wanted, read = [wanted_text(item.prompt) for item in items], load()
        return np.array(
            [text_score(a, read(b.convert("RGB"))) for a, b in zip(wanted, images, strict=True)]
        )

    return score


ocr.check_item = lambda item, kwargs: wanted_text(item.prompt)


@cache
def _rapidocr(threads: int) -> Reader:
    """An image → its text, lines joined; for all rewards and threads of the process."""
    import cv2
    from rapidocr import RapidOCR

    threads = min(
        threads, os.cpu_count() or 1
    )  # RapidOCR takes all cores where it is given more than there are
    cv2.setNumThreads(threads)
    limits = {
        f"EngineConfig.onnxruntime.{kind}_op_num_threads": threads for kind in ("intra", "inter")
    }
    # Upright text only, as PaddleOCR below; an image without text is no reason for a warning.
    engine = RapidOCR(params=limits | {"Global.use_cls": False, "Global.log_level": "error"})
    return lambda image: " ".join(engine(image).txts or ())


@cache
def _paddleocr(lang: str, gpu: bool) -> Reader:
    """PaddleOCR 2, likewise."""
    from paddleocr import PaddleOCR

    engine = PaddleOCR(use_angle_cls=False, lang=lang, use_gpu=gpu, show_log=False)
    return lambda image: " ".join(
        line[1][0] for page in engine.ocr(np.asarray(image), cls=False) for line in page or []
    )
