"""consistency_score: all pairs of sub-figures, the mean, and missing is missing."""

import importlib.util
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paco_grpo.rewards.consistency import ConsistencyScore, consistency_score
from paco_grpo.types import Item
from paco_judge.client import JudgeUnavailable, Pair
from paco_judge.questions import theme_question
from paco_judge.verdict import Verdict

PROMPT = "A 2x2 grid layout of one cat. [TOP]-[LEFT]: a. [TOP]-[RIGHT]: b. [BOTTOM]-[LEFT]: c. [BOTTOM]-[RIGHT]: d."


@pytest.fixture(scope="module")
def fake_judge():
    """The client's tests' small HTTP judge."""
    path = Path(__file__).resolve().parents[3] / "PaCo-Reward" / "judge" / "tests" / "fake_judge.py"
    spec = importlib.util.spec_from_file_location("fake_judge", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class StubJudge:
    """Answers from the mean gray of the two images, and remembers what it was asked."""

    def __init__(self, missing: Sequence[int] = ()):
        self.asked: list[Pair] = []
        self.missing = missing

    def score_blocking(self, pairs):
        first = len(self.asked)
        self.asked.extend(pairs)
        return [
            Verdict(None, "no answer") if first + i in self.missing else Verdict(closeness(pair))
            for i, pair in enumerate(pairs)
        ]


def closeness(pair: Pair) -> float:
    a, b = (float(np.asarray(image).mean()) for image in (pair.image_a, pair.image_b))
    return 1 - abs(a - b) / 255


def grid(grays) -> Image.Image:
    array = np.zeros((32, 32, 3), dtype=np.uint8)
    for value, (row, col) in zip(grays, itertools.product((0, 16), (0, 16)), strict=True):
        array[row : row + 16, col : col + 16] = value
    return Image.fromarray(array)


def test_mean_over_all_pairs():
    grays = (0, 50, 100, 200)
    judge = StubJudge()
    scores = ConsistencyScore(judge, "theme")([grid(grays), grid((7,) * 4)], [Item(0, PROMPT), Item(1, PROMPT)])
    expected = np.mean([1 - abs(a - b) / 255 for a, b in itertools.combinations(grays, 2)])
    assert scores == pytest.approx([expected, 1.0])
    assert len(judge.asked) == 12
    assert {pair.question for pair in judge.asked} == {theme_question("A 2x2 grid layout of one cat.")}


@pytest.mark.parametrize("criteria", [0, 1, 9])
def test_one_grid_costs_six_requests_whatever_its_criteria(fake_judge, criteria):
    named = {f"dimension {i % 3}": {f"name {i}": f"text {i}"} for i in range(criteria)}
    item = Item(0, PROMPT, metadata={"prompt": PROMPT, "criteria": named})
    with fake_judge.FakeJudge() as judge:
        scores = consistency_score(base_url=judge.url, deadline_s=20)([grid((criteria, 90, 120, 200))], [item])
        assert scores == pytest.approx([0.75]) and len(judge.requests) == 6


def test_a_missing_pair_makes_the_image_missing():
    score = ConsistencyScore(StubJudge(missing=[8]), "theme")
    scores = score([grid((1, 2, 3, 4))] * 2, [Item(0, PROMPT), Item(1, PROMPT)])
    assert np.isfinite(scores[0]) and np.isnan(scores[1])


def test_question_variant_changes_the_question():
    judge = StubJudge()
    ConsistencyScore(judge, "theme_no_duplicates")([grid((1, 2, 3, 4))], [Item(0, PROMPT)])
    assert "near-duplicates" in judge.asked[0].question
    with pytest.raises(ValueError, match="Known: theme, theme_no_duplicates, criteria"):
        consistency_score(question="themes")


def test_criteria_are_averaged_within_a_dimension_then_over_dimensions_then_over_pairs():
    criteria = {"Style": {"Line": "Same line.", "empty": None}, "Identity": {"Cat": "One cat", "Hat": "One hat."}}
    values = {"Same line.": 0.9, "One cat": 0.2, "One hat.": 0.4}

    class Judge(StubJudge):
        def score_blocking(self, pairs):
            self.asked.extend(pairs)
            return [Verdict(next(v for text, v in values.items() if text in p.question) * closeness(p)) for p in pairs]

    grays, judge = (0, 50, 100, 200), Judge()
    item = Item(0, PROMPT, metadata={"criteria": criteria})
    (score,) = ConsistencyScore(judge, "criteria")([grid(grays)], [item])
    of_pairs = [1 - abs(a - b) / 255 for a, b in itertools.combinations(grays, 2)]
    assert score == pytest.approx(np.mean([np.mean([0.9, np.mean([0.2, 0.4])]) * c for c in of_pairs]))
    assert len(judge.asked) == 6 * 3
    with pytest.raises(ValueError, match="item 7: the item has no criteria"):
        ConsistencyScore(judge, "criteria")([grid(grays)], [Item(7, PROMPT)])
    (missing,) = ConsistencyScore(StubJudge(missing=[17]), "criteria")([grid(grays)], [item])
    assert np.isnan(missing)


def test_single_panel_is_refused():
    with pytest.raises(ValueError, match="item 3 has one"):
        ConsistencyScore(StubJudge(), "theme")([grid((1, 2, 3, 4))], [Item(3, "a cat")])


def test_judge_that_does_not_run_says_how_to_start_it():
    with pytest.raises(JudgeUnavailable, match="vllm_server/launch.sh"):
        consistency_score(base_url="http://127.0.0.1:9", deadline_s=2).check()
