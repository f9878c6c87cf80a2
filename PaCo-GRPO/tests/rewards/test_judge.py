"""Rewards that ask a judge, over a real HTTP server whose answers the test decides."""

import base64
import hashlib
import io
import itertools
import json

import numpy as np
import pytest
from fakes import fake_judge
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from paco_grpo.rewards.judge import (
    BetweenImages,
    ConsistencyForEditing,
    ConsistencyScore,
    GridLayout,
    WinRate,
)
from paco_grpo.rewards.registry import RewardError, build_rewards, write_records
from paco_grpo.types import Item
from paco_judge.questions import (
    editing_texts,
    load_editing_questions,
    load_question,
    theme_question,
)

PROMPT = "A 2x2 grid layout of one cat. [TOP]-[LEFT]: a. [TOP]-[RIGHT]: b. [BOTTOM]-[LEFT]: c. [BOTTOM]-[RIGHT]: d."
CRITERIA = {
    "Style": {"Line": "Same line.", "empty": None},
    "Identity": {"Cat": "One cat", "Hat": "One hat."},
}
RED, GREEN, BLUE = (Image.new("RGB", (8, 8), color) for color in ("red", "lime", "blue"))
UNSURE = {
    "choices": [
        {"logprobs": {"content": [{"top_logprobs": [{"token": "Maybe", "logprob": -0.1}]}]}}
    ]
}


def content(request) -> list:
    """Images (first pixel) and texts of a request, in order."""

    def pixel(url: str):
        return Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))).getpixel((0, 0))

    parts = request["messages"][0]["content"]
    return [
        part["text"] if part["type"] == "text" else pixel(part["image_url"]["url"])
        for part in parts
    ]


def judge_that(p_yes_of, model="PaCo-Reward-7B"):
    """A judge that answers with P(Yes) = ``p_yes_of(content)``; None: with something else."""

    def respond(number, request):
        p_yes = p_yes_of(content(request))
        return 200, UNSURE if p_yes is None else fake_judge.answer(p_yes), {}

    return fake_judge.FakeJudge(respond, models=[model])


def asked(judge) -> list:
    return sorted(map(content, judge.requests), key=str)


def closeness(parts) -> float:
    (a, *_), (b, *_), _ = parts
    return 0.9 - 0.8 * abs(a - b) / 255


def grid(grays) -> Image.Image:
    array = np.zeros((32, 32, 3), dtype=np.uint8)
    for value, (row, col) in zip(grays, itertools.product((0, 16), (0, 16)), strict=True):
        array[row : row + 16, col : col + 16] = value
    return Image.fromarray(array)


GRAYS = (0, 50, 100, 200)


def expected(grays) -> float:
    return np.mean([closeness([(a,), (b,), ""]) for a, b in itertools.combinations(grays, 2)])


def test_mean_over_all_pairs():
    """A missing pair makes its image missing."""
    items = [
        Item(0, PROMPT, metadata={"criteria": CRITERIA}),
        Item(1, PROMPT),
        Item(2, PROMPT),
    ]  # criteria: not asked
    with judge_that(
        lambda parts: None if (parts[0][0], parts[1][0]) == (60, 80) else closeness(parts)
    ) as judge:
        scores = ConsistencyScore(judge.url)(
            [grid(GRAYS), grid((7, 7, 7, 9)), grid((60, 70, 80, 90))], items
        )
    assert scores == pytest.approx([expected(GRAYS), expected((7, 7, 7, 9)), np.nan], nan_ok=True)
    assert len(judge.requests) == 18
    assert {content(request)[-1] for request in judge.requests} == {
        theme_question("A 2x2 grid layout of one cat.")
    }


def test_criteria_are_averaged_within_a_dimension_then_over_dimensions_then_over_pairs():
    values = {"Same line.": 0.9, "One cat": 0.2, "One hat.": 0.4}
    item = Item(0, PROMPT, metadata={"criteria": CRITERIA})

    def p_yes(parts):
        return next(v for text, v in values.items() if text in parts[-1]) * closeness(parts)

    with judge_that(p_yes) as judge:
        (score,) = ConsistencyScore(judge.url, question="criteria")([grid(GRAYS)], [item])
    assert score == pytest.approx(np.mean([0.9, np.mean([0.2, 0.4])]) * expected(GRAYS))
    assert len(judge.requests) == 6 * 3


def open_item(number: int) -> Item:
    return Item(number, PROMPT, metadata={"open": True})


def test_between_images_compares_within_groups_only():
    levels = {
        0: (10, 60, 200),
        1: (0, 255),
    }  # item → gray of its images, whose sub-figures are alike
    items = (
        [open_item(i) for i, grays in levels.items() for _ in grays]
        + [Item(2, PROMPT)] * 2
        + [open_item(3)]
    )
    images = [grid((g,) * 4) for grays in levels.values() for g in grays] + [grid((9,) * 4)] * 3
    with judge_that(closeness) as judge:
        scores = BetweenImages(judge.url)(images, items)
    wanted = [
        1 - np.mean([closeness([(a,), (b,), ""]) for j, b in enumerate(grays) if i != j])
        for grays in levels.values()
        for i, a in enumerate(grays)
    ]
    np.testing.assert_allclose(scores, [*wanted, 1, 1, 1], atol=1e-6)
    assert (
        len(judge.requests) == 3 + 1
    )  # nothing is asked about a full prompt, or about an image alone
    with judge_that(
        lambda parts: 0.9 if parts[0] == parts[1] else 0.1
    ) as judge:  # never sub-figures of one place
        scores = BetweenImages(judge.url)([grid((0, 80, 160, 240))] * 3, [open_item(0)] * 3)
    np.testing.assert_allclose(scores, 0.9, atol=1e-6)


def test_between_images_is_the_mean_of_the_answers_received():
    def p_yes(parts):
        grays = {parts[0][0], parts[1][0]}
        return None if 50 in grays or grays == {0, 100} else 0.5 if 200 in grays else 0.2

    with judge_that(p_yes) as judge:
        scores = BetweenImages(judge.url)([grid((g,) * 4) for g in GRAYS], [open_item(0)] * 4)
    np.testing.assert_allclose(scores, [0.5, np.nan, 0.5, 0.5], atol=1e-6)


COUNTER = itertools.count()


@settings(max_examples=15)
@given(st.data(), st.integers(1, 6), st.sampled_from([None, 2, 4]))
def test_win_rate_is_the_mean_over_both_orders_and_the_opponents_answered(data, count, opponents):
    p = st.one_of(st.floats(0.01, 0.99), st.just(np.nan))
    answers = np.array(data.draw(st.lists(p, min_size=count**2, max_size=count**2))).reshape(
        count, count
    )
    images = [Image.new("RGB", (4, 4), (i, i, i)) for i in range(count)]
    item = Item(0, str(next(COUNTER)))  # answers are cached by question and address
    with judge_that(
        lambda parts: None if np.isnan(p := answers[parts[-3][0], parts[-2][0]]) else p
    ) as judge:
        scores = WinRate(judge.url, max_concurrency=4, opponents=opponents)(images, [item] * count)
    both = (answers + 1 - answers.T) / 2
    distance = abs(np.subtract.outer(np.arange(count), np.arange(count)))
    distance = np.minimum(distance, count - distance)
    met = (distance > 0) & (distance <= (count if opponents is None else opponents // 2))
    for i in range(count):
        own = both[i, met[i] & ~np.isnan(both[i])]
        np.testing.assert_allclose(scores[i], own.mean() if len(own) else np.nan, atol=1e-6)
    assert (
        len({json.dumps(request) for request in judge.requests}) == met.sum()
    )  # k·opponents questions


def test_win_rate_compares_within_prompts_and_shows_the_references_first():
    cat, edit = Item(0, "a cat"), Item(1, "make it blue", references=(RED, GREEN))
    with judge_that(lambda parts: 0.9) as judge:
        scores = WinRate(judge.url)(
            [RED, BLUE, RED, BLUE, RED], [cat, cat, edit, edit, Item(2, "x")]
        )
    np.testing.assert_allclose(scores, [0.5] * 4 + [np.nan], atol=1e-6)
    orders = ((255, 0, 0), (0, 0, 255)), ((0, 0, 255), (255, 0, 0))
    plain, edited = (
        load_question("better").text(prompt="a cat"),
        load_question("better_edit").text(prompt=edit.prompt),
    )
    wanted = [[*order, plain] for order in orders] + [
        [(255, 0, 0), (0, 255, 0), *order, edited] for order in orders
    ]
    assert asked(judge) == sorted(wanted, key=str)


def test_editing_is_the_geometric_mean_of_kept_and_followed():
    item = Item(3, "make it blue", references=(lambda: RED.copy(),))
    followed, kept = editing_texts(load_editing_questions(), item.prompt).values()
    answers = {kept: 0.81, followed: 0.49}
    with judge_that(lambda parts: answers[parts[-1]]) as judge:
        reward = ConsistencyForEditing(judge.url)
        assert reward([BLUE, RED], [item, item]) == pytest.approx([np.sqrt(0.81 * 0.49)] * 2)
        assert ConsistencyForEditing(judge.url, question="editing_instruction")(
            [BLUE], [item]
        ) == pytest.approx([0.49])
    wanted = [
        [(255, 0, 0), edited, text]
        for edited in ((0, 0, 255), (255, 0, 0))
        for text in (kept, followed)
    ]
    wanted.append([(255, 0, 0), (0, 0, 255), followed])  # of the second reward
    assert asked(judge) == sorted(wanted, key=str)
    answers[kept] = None
    with judge_that(lambda parts: answers[parts[-1]]) as judge:
        assert np.isnan(ConsistencyForEditing(judge.url)([BLUE], [item])).all()
    with pytest.raises(ValueError, match="item 5 .*config.prompt_fn"):
        reward([BLUE], [Item(5, "x")])


def test_several_references_are_asked_about_one_by_one_and_the_instruction_with_all():
    item = Item(3, "put them side by side", references=(RED, GREEN.copy, BLUE))
    kept = load_question("editing_consistency").text(instruction=item.prompt)
    followed = load_question("editing_instruction_several").text(instruction=item.prompt)
    p_kept = {(255, 0, 0): 0.9, (0, 255, 0): 0.6, (0, 0, 255): 0.3}
    with judge_that(lambda parts: 0.25 if parts[-1] == followed else p_kept[parts[0]]) as judge:
        assert ConsistencyForEditing(judge.url)([BLUE], [item]) == pytest.approx(
            [np.sqrt(0.6 * 0.25)]
        )
    wanted = [[reference, (0, 0, 255), kept] for reference in p_kept] + [
        [*p_kept, (0, 0, 255), followed]
    ]
    assert asked(judge) == sorted(wanted, key=str)


def test_a_users_wording_and_form(tmp_path):
    """Published numbers: a file's text, a label before each image, JPEG, and every spelling of yes
    and no.
    """
    (tmp_path / "mine.txt").write_text("Same {theme}?\n")
    top = [
        {"token": token, "logprob": np.log(p)}
        for token, p in {"yes": 0.2, "No": 0.1, " n": 0.1}.items()
    ]
    reply = {"choices": [{"logprobs": {"content": [{"top_logprobs": top}]}}]}
    form = {"image_labels": "<img{n}>: ", "image_format": "jpeg", "answer_tokens": "variants"}
    with fake_judge.FakeJudge(
        lambda number, request: (200, reply, {}), models=["PaCo-Reward-7B"]
    ) as judge:
        reward = ConsistencyScore(judge.url, question=str(tmp_path / "mine.txt"), **form)
        assert reward([grid((0, 90, 180, 255))], [Item(0, PROMPT)]) == pytest.approx([0.5])
    first, a, second, b, text = judge.requests[0]["messages"][0]["content"]
    texts = [part["text"] for part in (first, second, text)]
    assert texts == ["<img1>: ", "<img2>: ", "Same A 2x2 grid layout of one cat.?"]
    assert all(part["image_url"]["url"].startswith("data:image/jpeg;base64,") for part in (a, b))
    digest = hashlib.sha256(b"Same {theme}?").hexdigest()
    assert reward.record == form | {
        "questions": [{"name": "mine", "template": "Same {theme}?", "sha256": digest}]
    }


def test_host_and_port_in_place_of_the_address(caplog):
    """As published: only a port, and a served name that differs in letter case."""
    with judge_that(closeness, "Paco-Reward-7B") as judge:
        for place in ({"port": judge.port}, {"port": judge.port, "host": "127.0.0.1"}):
            ConsistencyScore(model="PaCo-Reward-7B", **place).check()
    assert "Paco-Reward-7B" in caplog.text
    with pytest.raises(ValueError, match="base_url=.*port="):
        ConsistencyScore(judge.url, port=8000)


@pytest.mark.parametrize(("binary", "scores"), [(False, [0.25, 0.5, 0.75]), (True, [0, 0, 1])])
def test_grid_layout_asks_about_one_image(binary, scores):
    colors = {(0, 0, 255): 0.25, (255, 0, 0): 0.5, (0, 0, 0): 0.75, (255, 255, 255): None}
    images = [Image.new("RGB", (8, 8), color) for color in colors]
    with judge_that(lambda parts: colors[parts[0]], "Qwen2.5-VL-7B-Instruct") as judge:
        found = GridLayout(judge.url, binary=binary)(
            images, [Item(0, "A 2x3 grid layout of a cat.")] * 4
        )
    assert found[:3] == pytest.approx(scores) and np.isnan(found[3])
    assert content(judge.requests[0])[1:] == [load_question("grid_layout").text(rows=2, cols=3)]


def test_what_cannot_be_asked_is_refused():
    with pytest.raises(ValueError, match="item 3 "):
        GridLayout()([BLUE], [Item(3, "a single panel")])
    for reward, wrong in (
        (BetweenImages, {"others": 0}),
        (BetweenImages, {"others": 3}),
        (WinRate, {"opponents": 3}),
        (WinRate, {"question": "theme"}),
        (ConsistencyScore, {"question": "editing_instruction"}),
        (ConsistencyScore, {"question": "themes"}),
        (ConsistencyForEditing, {"question": ("editing_instruction",) * 3}),
    ):
        with pytest.raises(ValueError):
            reward(**wrong)


def test_a_run_records_what_its_rewards_ask(tmp_path):
    write_records(
        rewards := build_rewards({"jpeg_compressibility": 1.0, "consistency_for_editing": 0.0}),
        tmp_path,
    )
    ((name, record),) = json.loads((tmp_path / "questions.json").read_text()).items()
    assert name == "consistency_for_editing" and rewards[name].parallel_calls == 64, (
        "images in flight"
    )
    assert [question["name"] for question in record["questions"]] == [
        "editing_consistency",
        "editing_instruction",
    ]


@pytest.mark.parametrize(
    ("name", "item"),
    [
        ("consistency_score", Item(0, PROMPT)),
        ("between_images", Item(0, PROMPT, metadata={"open": True})),
        ("win_rate", Item(0, PROMPT)),
        ("consistency_for_editing", Item(0, "make it blue", references=(RED,))),
        ("grid_layout", Item(0, PROMPT)),
    ],
)
def test_a_run_begins_with_one_real_question_to_the_judge(name, item):
    """A server may list its models and answer nothing that a score can be read from."""
    model = "Qwen2.5-VL-7B-Instruct" if name == "grid_layout" else "PaCo-Reward-7B"
    with judge_that(lambda parts: 0.5, model) as judge:
        (reward,) = build_rewards({name: 1.0}, {name: {"base_url": judge.url}}).values()
        reward.check_items([item, item])
        assert len(judge.requests) == 1
    with judge_that(lambda parts: None, model) as judge:
        (reward,) = build_rewards({name: 1.0}, {name: {"base_url": judge.url}}).values()
        with pytest.raises(RewardError, match=f"{name}.*neither Yes nor No.*base_url"):
            reward.check_items([item])


def test_without_an_open_prompt_there_is_nothing_to_ask_between_images():
    with judge_that(lambda parts: 0.5) as judge:
        kwargs = {"between_images": {"base_url": judge.url}}
        (reward,) = build_rewards({"between_images": 1.0}, kwargs).values()
        reward.check_items([Item(0, PROMPT)])
    assert not judge.requests
