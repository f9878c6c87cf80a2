"""Rewards that ask a judge, over a real HTTP server whose answers the test decides."""

import base64
import hashlib
import io
import itertools
import json

import numpy as np
import pytest
from fakes import fake_judge
from PIL import Image

from paco_grpo.rewards.errors import RewardError
from paco_grpo.rewards.judge import ConsistencyForEditing, ConsistencyScore, GridLayout
from paco_grpo.rewards.registry import build_rewards, write_records
from paco_grpo.types import Item
from paco_judge.client import JudgeUnavailable
from paco_judge.questions import editing_texts, load_editing_questions, load_question, theme_question

PROMPT = "A 2x2 grid layout of one cat. [TOP]-[LEFT]: a. [TOP]-[RIGHT]: b. [BOTTOM]-[LEFT]: c. [BOTTOM]-[RIGHT]: d."
CRITERIA = {"Style": {"Line": "Same line.", "empty": None}, "Identity": {"Cat": "One cat", "Hat": "One hat."}}
RED, BLUE = (Image.new("RGB", (8, 8), color) for color in ("red", "blue"))
UNSURE = {"choices": [{"logprobs": {"content": [{"top_logprobs": [{"token": "Maybe", "logprob": -0.1}]}]}}]}


def content(request) -> list:
    """Images (first pixel) and texts of a request, in order."""
    parts = request["messages"][0]["content"]
    return [part["text"] if part["type"] == "text" else pixel(part["image_url"]["url"]) for part in parts]


def pixel(url: str):
    return Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))).getpixel((0, 0))


def judge_that(p_yes_of, model="PaCo-Reward-7B"):
    """A judge that answers with P(Yes) = ``p_yes_of(content)``, or unsure if that is None."""

    def respond(number, request):
        p_yes = p_yes_of(content(request))
        return 200, UNSURE if p_yes is None else fake_judge.answer(p_yes), {}

    return fake_judge.FakeJudge(respond, models=[model])


def closeness(parts) -> float:
    (a, *_), (b, *_), _ = parts
    return 0.9 - 0.8 * abs(a - b) / 255


def grid(grays) -> Image.Image:
    array = np.zeros((32, 32, 3), dtype=np.uint8)
    for value, (row, col) in zip(grays, itertools.product((0, 16), (0, 16)), strict=True):
        array[row : row + 16, col : col + 16] = value
    return Image.fromarray(array)


def expected(grays) -> list[float]:
    return [closeness([(a,), (b,), ""]) for a, b in itertools.combinations(grays, 2)]


@pytest.mark.parametrize("question", ["theme", "theme_no_duplicates"])
def test_mean_over_all_pairs(question):
    grays = (0, 50, 100, 200)
    items = [Item(0, PROMPT, metadata={"criteria": CRITERIA}), Item(1, PROMPT)]  # criteria cost nothing here
    with judge_that(closeness) as judge:
        scores = ConsistencyScore(judge.url, question=question)([grid(grays), grid((7, 7, 7, 9))], items)
    assert scores == pytest.approx([np.mean(expected(grays)), np.mean(expected((7, 7, 7, 9)))])
    assert len(judge.requests) == 6 + 2  # equal pairs are asked once
    (text,) = {content(request)[-1] for request in judge.requests}
    assert (text == theme_question("A 2x2 grid layout of one cat.")) == (question == "theme")
    assert ("near-duplicates" in text) == (question != "theme")


def test_criteria_are_averaged_within_a_dimension_then_over_dimensions_then_over_pairs():
    values = {"Same line.": 0.9, "One cat": 0.2, "One hat.": 0.4}
    grays, item = (0, 50, 100, 200), Item(0, PROMPT, metadata={"criteria": CRITERIA})

    def p_yes(parts):
        return next(v for text, v in values.items() if text in parts[-1]) * closeness(parts)

    with judge_that(p_yes) as judge:
        (score,) = ConsistencyScore(judge.url, question="criteria")([grid(grays)], [item])
    assert score == pytest.approx(np.mean([0.9, np.mean([0.2, 0.4])]) * np.mean(expected(grays)))
    assert len(judge.requests) == 6 * 3


@pytest.mark.parametrize("question", ["theme", "criteria"])
def test_a_missing_pair_makes_the_image_missing(question):
    items = [Item(i, PROMPT, metadata={"criteria": CRITERIA}) for i in range(2)]
    images = [grid((10, 20, 30, 40)), grid((50, 60, 70, 80))]
    with judge_that(lambda parts: None if parts[0][0] == 50 and parts[1][0] == 80 else 0.5) as judge:
        scores = ConsistencyScore(judge.url, question=question)(images, items)
    assert scores[0] == pytest.approx(0.5) and np.isnan(scores[1])


def test_editing_is_the_geometric_mean_of_kept_and_followed():
    item = Item(3, "make it blue", image=lambda: RED.copy())
    followed, kept = editing_texts(load_editing_questions(), item.prompt).values()
    with judge_that(lambda parts: 0.81 if parts[-1] == kept else 0.49) as judge:
        scores = ConsistencyForEditing(judge.url)([BLUE, RED], [item, item])
    assert scores == pytest.approx([np.sqrt(0.81 * 0.49)] * 2)
    wanted = [[(255, 0, 0), edited, text] for edited in ((0, 0, 255), (255, 0, 0)) for text in (kept, followed)]
    assert sorted(map(content, judge.requests), key=str) == sorted(wanted, key=str)


def test_editing_without_one_answer_is_missing_and_without_reference_is_an_error():
    kept = load_question("editing_consistency").text(instruction="x")
    with judge_that(lambda parts: None if parts[-1] == kept else 0.5) as judge:
        reward = ConsistencyForEditing(judge.url)
        assert np.isnan(reward([BLUE], [Item(0, "x", image=RED)])).all()
        with pytest.raises(ValueError, match="consistency_for_editing.* item 5 .*config.prompt_fn"):
            reward([BLUE], [Item(5, "x")])


def test_a_users_wording_and_form(tmp_path):
    """Published numbers: a file's text, a label before each image, JPEG, and every spelling of yes and no."""
    (tmp_path / "mine.txt").write_text("Same {theme}?\n")
    top = [{"token": token, "logprob": np.log(p)} for token, p in {"yes": 0.2, "No": 0.1, " n": 0.1}.items()]
    reply = {"choices": [{"logprobs": {"content": [{"top_logprobs": top}]}}]}
    form = {"image_labels": "<img{n}>: ", "image_format": "jpeg", "answer_tokens": "variants"}
    with fake_judge.FakeJudge(lambda number, request: (200, reply, {}), models=["PaCo-Reward-7B"]) as judge:
        reward = ConsistencyScore(judge.url, question=str(tmp_path / "mine.txt"), **form)
        assert reward([grid((0, 90, 180, 255))], [Item(0, PROMPT)]) == pytest.approx([0.5])
    first, a, second, b, text = judge.requests[0]["messages"][0]["content"]
    assert (first["text"], second["text"], text["text"]) == (
        "<img1>: ",
        "<img2>: ",
        "Same A 2x2 grid layout of one cat.?",
    )
    assert all(part["image_url"]["url"].startswith("data:image/jpeg;base64,") for part in (a, b))
    digest = hashlib.sha256(b"Same {theme}?").hexdigest()
    assert reward.record == form | {"questions": [{"name": "mine", "template": "Same {theme}?", "sha256": digest}]}


def test_an_edit_with_one_question_has_its_score():
    with judge_that(lambda parts: 0.36) as judge:
        reward = ConsistencyForEditing(judge.url, question="editing_instruction")
        assert reward([BLUE], [Item(3, "make it blue", image=RED)]) == pytest.approx([0.36])
    assert [content(r)[-1] for r in judge.requests] == [
        load_question("editing_instruction").text(instruction="make it blue")
    ]


def test_host_and_port_in_place_of_the_address(caplog):
    """As published: only a port, and a served name that differs in letter case."""
    name = "consistency_score"
    with judge_that(closeness, "Paco-Reward-7B") as judge:
        for place in ({"port": judge.port}, {"port": judge.port, "host": "127.0.0.1"}):
            build_rewards({name: 1.0}, {name: {"model": "PaCo-Reward-7B", **place}})[name].check()
    assert "Paco-Reward-7B" in caplog.text
    for place in ({"port": 8000}, {"host": "localhost"}):
        with pytest.raises(RewardError, match=f"base_url=.*{next(iter(place))}="):
            build_rewards({name: 1.0}, {name: {"base_url": judge.url, **place}})


@pytest.mark.parametrize(("binary", "scores"), [(False, [0.25, 0.5, 0.75]), (True, [0, 0, 1])])
def test_grid_layout_asks_about_one_image(binary, scores):
    colors = {(0, 0, 255): 0.25, (255, 0, 0): 0.5, (0, 0, 0): 0.75, (255, 255, 255): None}
    images = [Image.new("RGB", (8, 8), color) for color in colors]
    with judge_that(lambda parts: colors[parts[0]], "Qwen2.5-VL-7B-Instruct") as judge:
        found = GridLayout(judge.url, binary=binary)(images, [Item(0, "A 2x3 grid layout of a cat.")] * 4)
    assert found[:3] == pytest.approx(scores) and np.isnan(found[3])
    assert content(judge.requests[0])[1:] == [load_question("grid_layout").text(rows=2, cols=3)]


@pytest.mark.parametrize("reward", [ConsistencyScore, GridLayout])
def test_a_single_panel_is_refused(reward):
    with pytest.raises(ValueError, match="item 3 "):
        reward()([BLUE], [Item(3, "a cat")])


def test_unusable_questions_and_an_absent_judge():
    with pytest.raises(ValueError, match="{instruction}"):
        ConsistencyScore(question="editing_instruction")
    with pytest.raises(ValueError, match="one or two"):
        ConsistencyForEditing(question=("editing_instruction",) * 3)
    with pytest.raises(ValueError, match="question 'themes'.*theme_no_duplicates"):
        ConsistencyScore(question="themes")
    with pytest.raises(JudgeUnavailable):
        ConsistencyScore("http://127.0.0.1:9", deadline_s=2).check()


def test_training_and_testing_may_use_other_judges():
    """Cross-model evaluation: the same reward with another model on another port."""
    item, name = Item(0, "make it blue", image=RED), "consistency_for_editing"
    for model, p_yes in (("small", 0.25), ("large", 0.75)):
        with judge_that(lambda parts, p_yes=p_yes: p_yes, model) as judge:
            reward = build_rewards({name: 1.0}, {name: {"base_url": judge.url, "model": model}})[name]
            reward.check()
            assert reward([BLUE], [item]) == pytest.approx([p_yes])
            assert {request["model"] for request in judge.requests} == {model}


def test_a_run_records_what_its_rewards_ask(tmp_path):
    rewards = build_rewards({"grid_layout": 1.0, "jpeg_compressibility": 1.0, "consistency_for_editing": 0.0})
    write_records(rewards, tmp_path)
    recorded = json.loads((tmp_path / "questions.json").read_text())
    assert {name: [q["name"] for q in asked["questions"]] for name, asked in recorded.items()} == {
        "grid_layout": ["grid_layout"],
        "consistency_for_editing": ["editing_consistency", "editing_instruction"],
    }
