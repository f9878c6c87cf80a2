"""Rewards that papers report: what they ask, and that each knows an order when it starts."""

import sys

import numpy as np
import pytest
from fakes import fake_judge
from PIL import Image, ImageDraw
from wired import IMAGES, ITEMS, MODELS

from paco_grpo.rewards.registry import build_rewards
from paco_grpo.types import Item
from paco_judge.errors import UserError

EDIT_REWARD = {"checkpoint": "folder", "config": "a.yaml", "batch_size": 2}


def built(name, device="cpu", **kwargs):
    return build_rewards({name: 1.0}, {name: kwargs}, device)[name]


def test_packages_get_their_arguments(packages, tmp_path):
    """Prompts and images by name: test_wiring.py."""
    images, items = IMAGES[:1], ITEMS[:1]
    built("hpsv3", "cuda:1", checkpoint="weights", batch_size=3)(images, items)
    built("edit_reward", **EDIT_REWARD)(images, items)
    dreamsim = {"dreamsim_type": "dino_vitb16", "cache_dir": str(tmp_path)}
    built("subfig_dreamsim", **dreamsim)(images, items)
    hps, edit, sub_figures = packages.loaded
    assert sub_figures.items() >= dreamsim.items()
    assert hps == {"config_path": None, "checkpoint_path": "weights", "device": "cuda:1"}
    assert (edit["config_path"], edit["checkpoint_path"]) == ("a.yaml", "folder")
    assert edit["reward_dim"] == "overall_detail"


@pytest.mark.parametrize("name", ["subfig_dreamsim", "imagereward"])
def test_what_a_package_downloads_makes_no_other_reward(packages, tmp_path, name):
    before = built(name, cache_dir=str(tmp_path)).identity()
    (tmp_path / "downloaded.pth").write_text("weights")
    assert built(name, cache_dir=str(tmp_path)).identity() == before


def test_a_package_that_prefers_noise_is_refused(packages, monkeypatch):
    built("hpsv3").check()
    (inferencer,) = vars(sys.modules["hpsv3"]).values()
    right = inferencer.reward
    monkeypatch.setattr(inferencer, "reward", lambda self, **batch: -right(self, **batch))
    with pytest.raises(UserError, match="hpsv3"):
        built("hpsv3").check()


first_token = fake_judge.first_token
GENEVAL2 = {
    "How many circles are in the image? Answer in one word.": first_token(
        ("two", 0.3), (" Two", 0.2), ("2", 0.1), ("three", 0.25), ("twofold", 0.05)
    ),
    "Are the circles red? Answer in one word.": first_token(
        ("No", 0.7), ("Yes", 0.2), (" no", 0.1)
    ),
    "What are they? Answer in one word.": first_token(("balls", 0.9), ("discs", 0.04)),
}


def test_geneval2_is_the_geometric_mean_of_the_right_answers_probabilities():
    def respond(number, request):
        images, question = fake_judge.request_content(request)
        assert len(images) == 1
        if images[0].size == IMAGES[1].size:
            return 400, {}, {}
        return 200, GENEVAL2[question], {}

    answers = ("two", "No", "circles")
    questions = [[text.removesuffix(" Answer in one word.") for text in GENEVAL2]]
    row = {"vqa_list": [list(pair) for pair in zip(*questions, answers, strict=True)]}
    items = [Item(0, "a", metadata=row), Item(1, "b", metadata={"vqa_list": row["vqa_list"][1:]})]
    with fake_judge.FakeJudge(respond, models=MODELS) as server:
        reward = built("geneval2", base_url=server.url)
        images = [IMAGES[0], IMAGES[2], IMAGES[1]]
        scores = reward(images, [*items, items[0]])
    # The last answer is not listed, and so at most as likely as the last that is.
    expected = [(0.6 * 0.8 * 0.04) ** (1 / 3), (0.8 * 0.04) ** (1 / 2), np.nan]
    assert scores == pytest.approx(expected, nan_ok=True)
    with pytest.raises(UserError, match="vqa_list"):
        reward.check_items([Item(3, "without questions")])


ANSWERS = {
    "a fox": "Alignment Score (1-5): 2.5\nCoherence Score (1-5): 4\nStyle Score (1-5): 3.25",
    "a cat": "fox (object): 1\nFinal Score: 4.5",
    "a dog": "Final Score: 45",
    "a bird": "It is a bird.",
}


def test_unified_reward_reads_its_grades(tmp_path):
    question = tmp_path / "question.txt"
    question.write_text("Caption: [{prompt}]\n")

    def respond(number, request):
        images, text = fake_judge.request_content(request)
        assert len(images) == 1 and "logprobs" not in request
        answer = ANSWERS[text.removeprefix("Caption: [").removesuffix("]")]
        return 200, fake_judge.written(answer), {}

    with fake_judge.FakeJudge(respond, models=MODELS) as server:
        reward = built("unified_reward", base_url=server.url, question=str(question))
        items = [Item(number, f" {prompt}\n") for number, prompt in enumerate(ANSWERS)]
        scores = reward(IMAGES[:4], items)
    assert scores == pytest.approx([9.75 / 3 / 5, 0.9, np.nan, np.nan], nan_ok=True)
    assert reward.record["questions"][0]["template"] == "Caption: [{prompt}]"
    with pytest.raises(UserError, match="question"):
        built("unified_reward")


def test_a_judge_that_answers_the_same_to_noise_is_refused(tmp_path):
    answer = fake_judge.answer(0.75)
    answer["choices"][0]["message"]["content"] = "Final Score: 3.75"
    question = tmp_path / "question.txt"
    question.write_text("Caption: [{prompt}]\n")
    arguments = {"geneval2": {}, "unified_reward": {"question": str(question)}}
    with fake_judge.FakeJudge(lambda *request: (200, answer, {}), models=MODELS) as server:
        for name, kwargs in arguments.items():
            reward = built(name, base_url=server.url, **kwargs)
            with pytest.raises(UserError, match=f"{name}.* 0.75 and noise 0.75 "):
                reward.prove([])


PHOTO = Image.fromarray(np.random.default_rng(1).integers(40, 90, (60, 100, 3), dtype=np.uint8))


def edit(*boxes, shift=0):
    """PHOTO with white boxes, and all pixels a little brighter."""
    image = PHOTO.point(lambda value: value + shift)
    for box in boxes:
        ImageDraw.Draw(image).rectangle(box, fill="white")
    return image


def test_kept_pixels_are_counted_outside_the_edit_and_a_copy_keeps_none():
    left = {"edit_box": [0, 0, 0.25, 1]}
    cases = [
        (edit((0, 0, 9, 59), shift=9), {}, 0.9),  # 9 is what a VAE does
        (edit((0, 0, 9, 59), (70, 0, 99, 29)), left, 1 - 30 * 30 / (75 * 60)),
        (edit((0, 0, 24, 59)), left, 1.0),
        (edit((0, 0, 0, 0), shift=9), left, 0.0),
        (edit(shift=20), {}, 0.0),
        # Rounded, the box would be everything; outside are its first column and last row.
        (edit((0, 0, 99, 58), (5, 59, 9, 59)), {"edit_box": [0.004, 0, 1, 0.993]}, 1 - 64 / 159),
    ]
    images, rows, expected = zip(*cases, strict=True)
    items = [Item(0, "edit", metadata=row, references=(PHOTO,)) for row in rows]
    assert built("kept_pixels")(images, items) == pytest.approx(expected)
    built("kept_pixels").check_items(items)
    boxes = ([0, 0, 25, 60], [0, 0, 1, 1], [0.001, 0.001, 0.999, 0.999], [0, 0, 1, 0.995])
    bad = [Item(0, "edit", metadata={"edit_box": box}, references=(PHOTO,)) for box in boxes]
    for item in (Item(0, "no reference"), *bad):
        with pytest.raises(UserError, match="kept_pixels"):
            built("kept_pixels").check_items([item])


def test_likeness_is_of_the_largest_face_of_each_reference(packages, monkeypatch):
    """Faces are points on a line here, by the color of an image's first pixel."""
    by_color = {
        0: [],  # the copy's and the empty reference
        10: [[0.0], [5.0]],
        20: [[0.75]],
        200: [[9.0], [0.3]],
        210: [],
        220: [[3.0]],
    }
    find = lambda image: np.array(by_color[image.getpixel((0, 0))[0]]).reshape(-1, 1)
    monkeypatch.setattr("paco_grpo.rewards.identity._finder", lambda: find)
    picture = lambda color: Image.new("RGB", (8, 8), (color, 0, 0))
    cases = [
        (200, (10,), 0.7),
        (200, (10, 20, 0), (0.7 + 0.55) / 2),
        (210, (10,), 0.0),
        (220, (20,), 0.0),  # farther than 1
        (10, (10,), 0.0),  # a copy
        (200, (0,), np.nan),
    ]
    items = []
    for number, (_, references, _) in enumerate(cases):
        items.append(Item(number, "edit", references=tuple(map(picture, references))))
    images = [picture(color) for color, *_ in cases]
    scores = built("face_likeness")(images, items)
    assert scores == pytest.approx([score for *_, score in cases], nan_ok=True)
    two_people = picture(10)
    two_people.paste(picture(20), (4, 0))
    row = {"reference_boxes": [[0.5, 0, 1, 1]]}
    item = Item(7, "edit", metadata=row, references=(two_people,))
    assert built("face_likeness")(images[:1], [item]) == pytest.approx([0.55])
