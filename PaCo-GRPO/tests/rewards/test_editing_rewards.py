"""Rewards of edits and of layouts, over a real HTTP server whose answers the test decides."""

import base64
import io
import json

import numpy as np
import pytest
from fakes import fake_judge
from PIL import Image

from paco_grpo.rewards.editing import consistency_for_editing
from paco_grpo.rewards.grid_layout import grid_layout
from paco_grpo.rewards.registry import build_rewards
from paco_grpo.types import Item
from paco_judge.questions import editing_questions, grid_layout_question

RED, BLUE = (Image.new("RGB", (8, 8), color) for color in ("red", "blue"))
GRID = "A 2x3 grid layout of a cat."


def shown(request) -> list:
    """Images (first pixel) and texts of a request, in order."""
    parts = request["messages"][0]["content"]
    return [part["text"] if part["type"] == "text" else pixel(part["image_url"]["url"]) for part in parts]


def pixel(url: str):
    return Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))).getpixel((0, 0))


def says(p_yes_of):
    return lambda number, request: (200, fake_judge.answer(p_yes_of(shown(request))), {})


def test_editing_is_the_geometric_mean_of_kept_and_followed():
    item = Item(3, "make it blue", image=lambda: RED.copy())
    kept, followed = editing_questions(item.prompt)
    with fake_judge.FakeJudge(says(lambda parts: 0.81 if parts[-1] == kept else 0.49), models=["judge"]) as judge:
        scores = consistency_for_editing(judge.url, "judge")([BLUE, RED], [item, item])
    assert scores == pytest.approx([np.sqrt(0.81 * 0.49)] * 2)
    assert sorted(map(shown, judge.requests), key=str) == sorted(
        [[(255, 0, 0), pixels, question] for pixels in ((0, 0, 255), (255, 0, 0)) for question in (kept, followed)],
        key=str,
    )


def test_editing_without_one_answer_is_missing_and_without_reference_is_an_error():
    kept, _ = editing_questions("x")
    unsure = {"choices": [{"logprobs": {"content": [{"top_logprobs": [{"token": "Maybe", "logprob": -0.1}]}]}}]}

    def respond(number, request):
        return (200, unsure if shown(request)[-1] == kept else fake_judge.answer(0.5), {})

    with fake_judge.FakeJudge(respond, models=["judge"]) as judge:
        reward = consistency_for_editing(judge.url, "judge")
        assert np.isnan(reward([BLUE], [Item(0, "x", image=RED)])).all()
        with pytest.raises(ValueError, match="item 5 has none; config.prompt_fn must be an editing kind"):
            reward([BLUE], [Item(5, "x")])


def test_grid_layout_asks_about_one_image():
    with fake_judge.FakeJudge(says(lambda parts: 0.25), models=["vlm"]) as judge:
        reward = grid_layout(judge.url, "vlm")
        assert reward([BLUE], [Item(0, GRID)]) == pytest.approx([0.25])
        with pytest.raises(ValueError, match="item 2 has none"):
            reward([BLUE], [Item(2, "a cat")])
    assert shown(judge.requests[0]) == [(0, 0, 255), grid_layout_question(2, 3)]


def test_training_and_testing_may_use_other_judges():
    """Cross-model evaluation: the same reward with another model on another port."""
    item = Item(0, "make it blue", image=RED)
    with (
        fake_judge.FakeJudge(says(lambda parts: 0.25), models=["small"]) as small,
        fake_judge.FakeJudge(says(lambda parts: 0.75), models=["large"]) as large,
    ):
        name = "consistency_for_editing"
        train, test = (
            build_rewards({name: 1.0}, {name: {"base_url": judge.url, "model": judge.models[0]}})[name]
            for judge in (small, large)
        )
        train.check(), test.check()
        assert train([BLUE], [item]) == pytest.approx([0.25])
        assert test([BLUE], [item]) == pytest.approx([0.75])
    assert {json.dumps(request["model"]) for request in small.requests} == {'"small"'}
    assert {json.dumps(request["model"]) for request in large.requests} == {'"large"'}
