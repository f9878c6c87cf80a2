"""Rewards that ask a vision-language model on a server about a whole image: unified_reward and
geneval2.
"""

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from typing_extensions import override

from paco_grpo.item import Item
from paco_grpo.rewards.asking import ServerReward
from paco_grpo.rewards.preference import check_order
from paco_judge.questions import Pair, load_question, record

logger = logging.getLogger(__name__)

_TOKENS = 1024
_GRADE = re.compile(r"Score(?: \(1-5\))?:\s*(\d+(?:\.\d+)?)")
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def _prefer_a_drawing(reward: ServerReward, items: Sequence[Item]) -> None:
    """``prove`` of a ``ServerReward``: it must prefer a drawing to noise."""
    check_order(reward)


@dataclass(eq=False)
class UnifiedReward(ServerReward):
    """unified_reward: mean of the grades from 1 to 5 in the model's answer, divided by 5.

    Grades are the numbers after ``Score (1-5):`` and ``Score:``.

    Args:
        question: Text file with the question that the model was trained on, which its repository
            has (arXiv 2503.05236), and {prompt} in the place of the caption.
    """

    question: str = ""
    default_model = "UnifiedReward-2.0-qwen-7b"
    prove = _prefer_a_drawing

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.question:
            raise ValueError("question must be a text file with the model's own question")
        self.template = load_question(self.question, ("prompt",))
        self.record = record((self.template,), self.form())

    @override
    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64 in [0.2, 1], NaN = missing."""
        pairs = []
        for image, item in zip(images, items, strict=True):
            pairs.append(Pair(image, None, self.template.text(prompt=item.prompt.strip())))
        answers = self.client.generate(pairs, _TOKENS)
        return np.array([_grade(answer.text, answer.error) for answer in answers])


def _grade(answer: str | None, problem: str | None) -> float:
    grades = [float(number) for number in _GRADE.findall(answer or "")]
    if not grades or not all(1 <= grade <= 5 for grade in grades):
        logger.warning("unified_reward: no grades from 1 to 5: %s: %.500r", problem, answer)
        return math.nan
    return sum(grades) / len(grades) / 5


@dataclass(eq=False)
class GenEval2(ServerReward):
    """geneval2: Soft-TIFA (arXiv 2512.16853), the geometric mean of P(right answer).

    The questions are the item's ``vqa_list``, ``[[question, answer], …]``, as in GenEval 2's file.
    An answer that is not among the likeliest tokens counts as likely as the last of them.
    """

    default_model = "Qwen3-VL-8B-Instruct"
    prove = _prefer_a_drawing

    @staticmethod
    def check_item(item: Item) -> None:
        """Raises ValueError: The item has no questions."""
        if not item.metadata.get("vqa_list"):
            raise ValueError("geneval2: the item has no 'vqa_list' with questions")

    @override
    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64 in [0, 1], NaN = missing."""
        pairs = []
        answers = []
        ends = []  # of each image's questions
        for image, item in zip(images, items, strict=True):
            self.check_item(item)
            for question, answer in item.metadata["vqa_list"]:
                pairs.append(Pair(image, None, f"{question} Answer in one word."))
                answers.append(answer)
            ends.append(len(pairs))
        probabilities = []
        for answer, top in zip(answers, self.client.first_tokens(pairs), strict=True):
            probabilities.append(_probability(answer, top))
        scores = []
        for of_image in np.split(np.array(probabilities), ends[:-1]):
            scores.append(of_image.prod() ** (1 / len(of_image)))
        return np.array(scores)


def _probability(answer: str, top: Sequence[tuple[str, float]] | None) -> float:
    """Of the ``answer``, also as a digit, by the log-probabilities of the first token."""
    if top is None:
        return math.nan
    word = answer.strip().lower()
    words = {word}
    if word in _NUMBERS:
        words.add(str(_NUMBERS.index(word)))
    right = []
    for token, logprob in top:
        if token.strip().lower() in words:
            right.append(logprob)
    return sum(map(math.exp, right or [min(logprob for _, logprob in top)]))
