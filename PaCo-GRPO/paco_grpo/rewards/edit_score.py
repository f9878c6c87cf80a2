"""edit_score: the EditScore judge of edits (arXiv 2509.23909, PyPI ``editscore``) on a server.

Prompts and parser are the package's. The requests are ours, because the package fills in a middle
score where an answer cannot be read.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from typing_extensions import override

from paco_grpo.item import Item
from paco_grpo.rewards.asking import ServerReward, plain_images
from paco_grpo.rewards.judge import check_one_reference
from paco_judge.questions import EDIT_DIMENSIONS, Pair, RequestForm

logger = logging.getLogger(__name__)

_TOKENS = 1024  # reasons come before the scores
# As set by the package; each further pass adds 1 to the seed.
_SEED = 42
_TEMPERATURE = 0.7
_DIMENSION = "edit_score_dimension"
# Of the two scores of an edit: is the instruction followed, is the rest kept?
_NUMBERS = {"prompt_following": 0, "consistency": 1}


@dataclass(eq=False)
class EditScore(ServerReward):
    """sqrt(lower edit score · lower quality score) / score_range, averaged over passes.

    The model gives two scores of each kind. An item's row may ask for one of the edit's two instead:
    its ``edit_score_dimension`` is one of ``EDIT_DIMENSIONS``, as EditReward-Bench has them.

    Args:
        score_range: Upper end of the scale that the model was trained with.
        num_pass: Answers that are averaged.
    """

    score_range: int = 25
    num_pass: int = 1
    max_concurrency: int = 32
    default_model = "EditScore-7B"

    def __post_init__(self) -> None:
        from editscore import vie_prompts  # pyright: ignore[reportMissingImports]
        from editscore.json_parser import parse_vlm_output_to_dict  # pyright: ignore[reportMissingImports]

        super().__post_init__()
        self._parse = parse_vlm_output_to_dict
        context = vie_prompts._context_no_delimit_reasoning_first
        rules = vie_prompts._prompts_0shot_two_image_edit_rule
        scale = vie_prompts._prompts_0shot_tie_rule_SC.replace("10", str(self.score_range))
        quality = vie_prompts._prompts_0shot_rule_PQ.replace("10", str(self.score_range))
        self._edit_prompt = f"{context}\n{rules}\n{scale}"
        self._quality_prompt = f"{context}\n{quality}"

    @override
    def form(self) -> RequestForm:
        return RequestForm("<img{n}>: ")  # as the model was trained

    @staticmethod
    def check_item(item: Item) -> None:
        """Raises ValueError: The item does not have one reference image, or another dimension."""
        check_one_reference(item, "edit_score")
        dimension = item.metadata.get(_DIMENSION, "overall")
        if dimension not in EDIT_DIMENSIONS:
            raise ValueError(f"{_DIMENSION} {dimension!r} is none of {', '.join(EDIT_DIMENSIONS)}")

    def prove(self, items: Sequence[Item]) -> None:
        """Ask about a plain image: the model must write its scores."""
        (image,) = plain_images(1)
        self.client.prove(Pair(image, None, self._quality_prompt), writes=True)

    @override
    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64 in [0, 1], NaN = missing."""
        pairs = []
        for image, item in zip(images, items, strict=True):
            self.check_item(item)
            edit_prompt = self._edit_prompt.replace("<instruction>", item.prompt)
            pairs.append(Pair(item.images[0], image, edit_prompt))
            pairs.append(Pair(image, None, self._quality_prompt))
        scores = []
        for number in range(self.num_pass):
            seed = _SEED + number
            answers = self.client.generate(pairs, _TOKENS, temperature=_TEMPERATURE, seed=seed)
            scores.append([self._scores(answer.text, answer.error) for answer in answers])
        # (passes, images, edit and quality, two scores)
        all_scores = np.reshape(scores, (self.num_pass, len(images), 2, 2))
        overall = np.sqrt(all_scores.min(axis=3).prod(axis=2)).mean(axis=0)
        of_edit = all_scores[:, :, 0].mean(axis=0)
        for index, item in enumerate(items):
            number = _NUMBERS.get(item.metadata.get(_DIMENSION, "overall"))
            if number is not None:
                overall[index] = of_edit[index, number]
        return overall

    def _scores(self, answer: str | None, problem: str | None) -> tuple[float, float]:
        """An answer's two scores, in [0, 1]; NaN if it lacks two scores in range."""
        try:
            if answer is None:
                raise ValueError(problem)
            first, second = map(float, self._parse(answer)["score"])
            scores = (first, second)
            if all(0 <= score <= self.score_range for score in scores):  # not true of NaN
                return first / self.score_range, second / self.score_range
            raise ValueError(f"a score is not in 0 to {self.score_range}")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            logger.warning("edit_score: no scores: %s: %.500r", error, answer)
            return math.nan, math.nan
