"""Held-out pair accuracy of a judge: the pairs of a ShareGPT data set, scored and compared with their labels."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from paco_judge.client import Pair
from paco_reward.errors import PacoRewardError
from paco_reward.images import open_image
from paco_reward.metrics import judge_report
from paco_reward.preflight import Example, load_examples
from paco_reward.scorer import JudgeScorer

TAG = "<image>"


def labelled_pairs(dataset_dir: str | Path, dataset: str, limit: int | None = None) -> tuple[list[Pair], list[bool]]:
    """Pairs of a local ShareGPT data set and whether their answer begins with Yes.

    Raises:
        PacoRewardError: the data set cannot be read, a row is not <image><image>QUESTION with an answer that begins
            with Yes or No, or an image is unreadable.
    """
    examples = load_examples(dataset_dir, dataset)
    if examples is None:
        raise PacoRewardError(f"dataset {dataset} is not a local file; download it and set file_name")
    cache: dict[Path, Any] = {}
    pairs, labels = [], []
    for example in examples[:limit]:
        question, label = _question_and_label(example)
        for file in example.images:
            if file not in cache:
                cache[file] = open_image(file)
        pairs.append(Pair(cache[example.images[0]], cache[example.images[1]], question))
        labels.append(label)
    return pairs, labels


def _question_and_label(example: Example) -> tuple[str, bool]:
    if len(example.images) != 2 or not example.prompt.startswith(TAG * 2):
        raise PacoRewardError(f"dataset {example.place}: a pair's message is {TAG}{TAG}QUESTION with two images")
    for word, label in (("Yes", True), ("No", False)):
        if example.answer.startswith(word):
            return example.prompt[2 * len(TAG) :], label
    raise PacoRewardError(
        f"dataset {example.place}: the answer begins with neither Yes nor No: {example.answer[:40]!r}"
    )


def measure(scorer: JudgeScorer, pairs: list[Pair], labels: list[bool]) -> dict[str, Any]:
    """accuracy, auc, ece, n of a judge on labelled pairs; missing (pairs without score), mean_p_yes, seconds."""
    started = time.monotonic()
    scores = np.array([np.nan if v.p_yes is None else v.p_yes for v in scorer.score(pairs)])
    report: dict[str, Any] = judge_report(scores, labels)
    return report | {
        "missing": int(np.isnan(scores).sum()),
        "mean_p_yes": float(np.nanmean(scores)) if not np.isnan(scores).all() else float("nan"),
        "seconds": round(time.monotonic() - started, 2),
    }
