"""Rewards that ask a judge, over a real HTTP server that answers each question otherwise."""

import itertools
import json
import math

import numpy as np
import pytest
from fakes import fake_judge
from PIL import Image
from wired import IMAGES, ITEM_IDS, ITEMS, MODELS, respond, share_of, shown_to_judge

from paco_grpo.rewards.judge import (
    BetweenImages,
    ConsistencyForEditing,
    ConsistencyScore,
    GridLayout,
    WinRate,
)
from paco_grpo.rewards.registry import build_rewards, write_records
from paco_grpo.types import Item
from paco_judge.errors import UserError
from paco_judge.grid import parse_layout, split_image, split_prompt
from paco_judge.questions import EDITING, RequestForm, load_question

UNSURE = fake_judge.first_token(("Maybe", 0.9))
GROUP = [position for position, number in enumerate(ITEM_IDS) if number == 2]  # 2x2, four images
IMAGE = IMAGES[GROUP[0]]
ITEM = ITEMS[GROUP[0]]


def judge_without(silent, about="", answer=UNSURE):
    """The judge, with this ``answer`` to questions ``about`` something with the images ``silent``,
    in this order.
    """
    silent = [image.tobytes() for image in silent]

    def respond_unless(number, request):
        *shown, text = shown_to_judge(request)
        is_silent = shown == silent and about in text
        return (200, answer, {}) if is_silent else respond(number, request)

    return fake_judge.FakeJudge(respond_unless, models=MODELS)


def p_yes(*images_and_text) -> float:
    """The judge's answer to a question that shows these images and then the text."""
    *images, text = images_and_text
    return share_of((*(image.tobytes() for image in images), text))


def cells_of(position: int) -> list[Image.Image]:
    return split_image(IMAGES[position], *parse_layout(ITEMS[position].prompt))


def mean_over_pairs(position: int, text: str) -> float:
    pairs = itertools.combinations(cells_of(position), 2)
    return np.mean([p_yes(cell, other, text) for cell, other in pairs])


def theme_question(item: Item) -> str:
    return load_question("theme").text(theme=split_prompt(item.prompt).theme)


def test_consistency_is_the_mean_over_all_pairs_of_panels(judge):
    """Without an answer to each, an image has no score."""
    expected = []
    for position, item in enumerate(ITEMS):
        expected.append(mean_over_pairs(position, theme_question(item)))
    scores = ConsistencyScore(judge.url)(IMAGES, ITEMS)
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    with judge_without(cells_of(3)[:2]) as silent:
        scores = ConsistencyScore(silent.url)(IMAGES, ITEMS)
    assert np.flatnonzero(np.isnan(scores)).tolist() == [3]


def test_criteria_are_averaged_within_a_dimension_then_over_dimensions(judge):
    expected = []
    for position, item in enumerate(ITEMS):
        dimensions = []
        for criteria in item.metadata["criteria"].values():
            texts = [load_question("criteria").text(criterion=text) for text in criteria.values()]
            dimensions.append(np.mean([mean_over_pairs(position, text) for text in texts]))
        expected.append(np.mean(dimensions))
    scores = ConsistencyScore(judge.url, question="criteria")(IMAGES, ITEMS)
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    one_of_two = ITEMS[3].metadata["criteria"]["identity"]["b"]
    with judge_without(cells_of(3)[:2], one_of_two) as silent:
        scores = ConsistencyScore(silent.url, question="criteria")(IMAGES, ITEMS)
    assert np.flatnonzero(np.isnan(scores)).tolist() == [3]


@pytest.mark.parametrize("silent", [(), (1, 2)])
def test_between_images_is_one_minus_the_mean_over_the_other_images_of_an_open_item(silent):
    """Pairs of panels at different places; the answers received count."""
    places = itertools.cycle(itertools.permutations(range(4), 2))
    answers = {i: [] for i in range(4)}
    unanswered = []
    for i, j in itertools.combinations(range(4), 2):
        place, other_place = next(places)
        pair = cells_of(GROUP[i])[place], cells_of(GROUP[j])[other_place]
        if (i, j) == silent:
            unanswered = pair
            continue
        answers[i].append(1 - p_yes(*pair, theme_question(ITEM)))
        answers[j].append(answers[i][-1])
    alone = Item(9, ITEM.prompt, metadata={"open": True})
    closed = Item(7, ITEM.prompt, metadata={"open": False})
    images = [*(IMAGES[position] for position in GROUP), IMAGE, IMAGE, IMAGES[GROUP[1]]]
    with judge_without(unanswered) as judge:
        scores = BetweenImages(judge.url)(images, [ITEM] * 4 + [alone, closed, closed])
    expected = [np.mean(answers[i]) for i in range(4)] + [1, 1, 1]
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    assert len(judge.requests) == 6


@pytest.mark.parametrize(("references", "opponents"), [(0, 2), (2, None)])
def test_win_rate_is_the_mean_over_both_orders_and_the_opponents_answered(references, opponents):
    """References are shown first; an image alone, or without an answer, has no score."""
    shown = [IMAGES[number] for number in range(references)]
    item = Item(5, ITEM.prompt, references=tuple(shown))
    question = load_question("better_edit" if references else "better").text(prompt=item.prompt)
    images = IMAGES[3:8]
    wins = {i: [] for i in range(5)}
    for i, j in itertools.permutations(range(5), 2):
        is_asked = opponents is None or (i - j) % 5 in (1, 4)
        if is_asked and {i, j} != {1, 2}:
            first = p_yes(*shown, images[i], images[j], question)
            second = p_yes(*shown, images[j], images[i], question)
            wins[i].append((first + 1 - second) / 2)
    with judge_without([*shown, images[2], images[1]]) as judge:
        reward = WinRate(judge.url, opponents=opponents)
        *scores, alone = reward([*images, IMAGE], [item] * 5 + [Item(6, "x")])
    np.testing.assert_allclose(scores, [np.mean(wins[i]) for i in range(5)], atol=1e-6)
    assert np.isnan(alone)
    with judge_without([*shown, images[0], images[1]]) as judge:
        scores = WinRate(judge.url)(images[:2], [item] * 2)
    assert np.isnan(scores).all()


def test_editing_is_the_geometric_mean_of_kept_and_followed(judge, tmp_path):
    """Of several references, each is asked about alone, and the instruction with all."""
    references = tuple(IMAGES[:3])
    several = Item(9, "put them side by side", references=references)
    kept, followed = (load_question(f"editing_{name}") for name in ("consistency", "instruction"))
    expected = []
    for image, item in zip(IMAGES, ITEMS, strict=True):
        answers = [
            p_yes(item.image, image, question.text(instruction=item.prompt))
            for question in (kept, followed)
        ]
        expected.append(np.sqrt(answers[0] * answers[1]))
    text = kept.text(instruction=several.prompt)
    of_each = np.mean([p_yes(reference, IMAGE, text) for reference in references])
    text = load_question("editing_instruction_several").text(instruction=several.prompt)
    expected.append(np.sqrt(of_each * p_yes(*references, IMAGE, text)))
    reward = ConsistencyForEditing(judge.url)
    scores = reward([*IMAGES, IMAGE], [*ITEMS, several])
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    followed_only = ConsistencyForEditing(judge.url, question="editing_instruction")
    text = followed.text(instruction=ITEM.prompt)
    assert followed_only([IMAGE], [ITEM]) == pytest.approx([p_yes(ITEM.image, IMAGE, text)])
    mine = tmp_path / "editing_instruction.txt"  # it is asked about several references, too
    mine.write_text("Is this done: {instruction}?")
    own = ConsistencyForEditing(judge.url, question=str(mine))
    text = f"Is this done: {several.prompt}?"
    of_each = np.mean([p_yes(reference, IMAGE, text) for reference in references])
    assert own([IMAGE], [several]) == pytest.approx([of_each])
    with judge_without([ITEM.image, IMAGE]) as silent:
        assert np.isnan(ConsistencyForEditing(silent.url)([IMAGE], [ITEM])).all()


def test_what_is_kept_is_asked_about_the_boxes_of_the_references(judge):
    """The instruction is asked about whole references, as the generator saw them."""
    references = tuple(IMAGES[4:7])
    boxes = [[0.25, 0.1, 0.8, 0.5], None, [0.0, 0.49, 0.37, 1]]
    item = Item(
        4, "show it in the snow", metadata={"reference_boxes": boxes}, references=references
    )
    shown = []
    for image, box in zip(references, boxes, strict=True):
        (left, right), (top, bottom) = np.reshape(box or [0, 0, 1, 1], (2, 2)).T
        rows = slice(math.floor(top * image.height), math.ceil(bottom * image.height))
        columns = slice(math.floor(left * image.width), math.ceil(right * image.width))
        shown.append(Image.fromarray(np.asarray(image)[rows, columns]))
    assert shown[0].size != references[0].size
    text = load_question("same_object").text()
    same = np.mean([p_yes(crop, IMAGE, text) for crop in shown])
    text = load_question("editing_instruction_several").text(instruction=item.prompt)
    followed = p_yes(*references, IMAGE, text)
    reward = ConsistencyForEditing(judge.url, question=["same_object", "editing_instruction"])
    assert reward([IMAGE], [item]) == pytest.approx([np.sqrt(same * followed)])
    alone = ConsistencyForEditing(judge.url, question="same_object")
    assert alone([IMAGE], [item]) == pytest.approx([same])


def test_grid_layout_asks_about_one_image():
    expected = []
    for image, item in zip(IMAGES, ITEMS, strict=True):
        rows, cols = parse_layout(item.prompt)
        expected.append(p_yes(image, load_question("grid_layout").text(rows=rows, cols=cols)))
    expected[4] = np.nan
    with judge_without([IMAGES[4]]) as judge:
        np.testing.assert_allclose(GridLayout(judge.url)(IMAGES, ITEMS), expected, atol=1e-6)
        binary = GridLayout(judge.url, binary=True)(IMAGES, ITEMS)
    rounded = np.where(np.isnan(expected), np.nan, np.greater(expected, 0.5))
    assert 0 < np.nansum(rounded) < 12
    np.testing.assert_array_equal(binary, rounded)
    with judge_without([IMAGES[4]], answer=fake_judge.answer(0.5)) as undecided:
        assert GridLayout(undecided.url, binary=True)(IMAGES[4:5], ITEMS[4:5]) == [0]


def test_a_users_wording_and_form(judge, tmp_path):
    """What they do to a request: paco-judge's tests."""
    (tmp_path / "mine.txt").write_text("Same {theme}?\n")
    form = {"image_labels": "<img{n}>: ", "image_format": "jpeg", "answer_tokens": "variants"}
    reward = ConsistencyScore(judge.url, question=str(tmp_path / "mine.txt"), **form)
    assert reward.client.form == RequestForm(*form.values())
    reward([IMAGE], [ITEM])
    last = judge.requests[0]["messages"][0]["content"][-1]
    assert last["text"] == f"Same {split_prompt(ITEM.prompt).theme}?"


def test_the_only_model_of_a_server_is_no_model_of_another_kind():
    """grid_layout asks about single images, on which the judge was not trained."""
    with fake_judge.FakeJudge(models=["mine"]) as server:
        with pytest.raises(UserError, match="'Qwen2.5-VL-7B-Instruct'.*'mine'.*model="):
            GridLayout(server.url).check()
        assert GridLayout(server.url, model="mine").check() == "mine"


def test_host_and_port_in_place_of_the_address(judge):
    for place in ({"port": judge.port}, {"port": judge.port, "host": "127.0.0.1"}):
        ConsistencyScore(**place).check()
    on_ipv6 = ConsistencyScore(host="fe80::3", port=8123).client
    assert on_ipv6.base_url == "http://[fe80::3]:8123"
    with pytest.raises(ValueError, match="base_url=.*port="):
        ConsistencyScore(judge.url, port=8000)


@pytest.mark.parametrize(
    ("reward", "wrong"),
    [
        (BetweenImages, {"others": 3}),
        (ConsistencyScore, {"question": "editing_instruction"}),
        (ConsistencyForEditing, {"question": [*EDITING, "pair"]}),
    ],
)
def test_what_cannot_be_asked_is_refused(reward, wrong):
    with pytest.raises(ValueError):
        reward(**wrong)


def test_a_run_records_what_its_rewards_ask(judge, tmp_path):
    kwargs = {"consistency_for_editing": {"base_url": judge.url}}
    rewards = build_rewards({"jpeg_compressibility": 1.0, "consistency_for_editing": 0.0}, kwargs)
    write_records(rewards, tmp_path)
    ((name, record),) = json.loads((tmp_path / "questions.json").read_text()).items()
    assert rewards[name].parallel_calls == 64  # images in flight
    names = [question["name"] for question in record["questions"]]
    assert names == ["editing_consistency", "editing_instruction"]


@pytest.mark.parametrize(
    "name",
    ["consistency_score", "between_images", "win_rate", "consistency_for_editing", "grid_layout"],
)
def test_a_run_begins_with_one_real_question_to_the_judge(name, judge):
    """A server may list its models and answer nothing that a score can be read from."""
    (reward,) = build_rewards({name: 1.0}, {name: {"base_url": judge.url}}).values()
    closed = Item(9, ITEM.prompt, references=ITEM.references)
    reward.prove([closed, *ITEMS])
    assert len(judge.requests) == 1
    judge.respond = lambda number, request: (200, UNSURE, {})
    with pytest.raises(UserError, match=f"{name}.*base_url"):
        reward.prove([ITEMS[1]])
