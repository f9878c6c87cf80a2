"""The scorer against a plain forward of transformers, for each family, on random weights."""

import numpy as np
import pytest
import tiny_judge
import torch
from PIL import Image

from paco_judge.client import Pair
from paco_judge.questions import theme_question
from paco_judge.scorer import JudgeScorer


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def folder(request, tmp_path_factory):
    made = tmp_path_factory.mktemp("judges") / request.param
    return (
        tiny_judge.save_judge(made)
        if request.param == "qwen2_5_vl"
        else tiny_judge.save_new_judge(made, request.param)
    )


@pytest.fixture(scope="module")
def scorer(folder):
    return JudgeScorer.from_pretrained(folder, batch_size=2)


@pytest.fixture(scope="module")
def pairs():
    """Questions and images of different lengths and sizes, so that a batch needs padding."""
    themes = [*tiny_judge.THEMES, "x", "a paper boat " * 12]
    images = [
        (tiny_judge.picture(i, 40 + 9 * i), tiny_judge.picture(i + 50)) for i in range(len(themes))
    ]
    return [Pair(*shown, theme_question(theme)) for shown, theme in zip(images, themes)]


def p_yes(scorer, pairs, **options):
    return np.array([verdict.p_yes for verdict in scorer.score(pairs, **options)])


def test_a_score_is_the_softmax_over_yes_and_no_of_a_plain_forward_whatever_its_batch(
    scorer, pairs
):
    expected = []
    for pair in pairs:
        text = scorer.prompt(scorer.chat(pair).messages)
        inputs = scorer.processor(text=[text], images=list(pair.images), return_tensors="pt")
        with torch.no_grad():
            logits = scorer.model(**inputs).logits[0, -1].double()
        expected.append(torch.sigmoid(logits[scorer.yes_id] - logits[scorer.no_id]).item())
    assert np.ptp(expected) > 1e-2  # the judge distinguishes them
    np.testing.assert_allclose(p_yes(scorer, pairs), expected, atol=1e-5)
    np.testing.assert_allclose(p_yes(scorer, pairs[::-1])[::-1], expected, atol=1e-5)
    assert [answer for answer in scorer.reasons(pairs[:2], 5) if answer]


def test_equal_images_of_a_batch_pass_the_vision_tower_once(folder, scorer):
    images = [tiny_judge.picture(seed, size) for seed, size in ((1, 40), (2, 90), (3, 40))]
    pairs = [
        Pair(images[i].copy(), images[j].copy(), "same?")
        for i, j in ((0, 1), (1, 0), (2, 1), (0, 0), (0, 2))
    ]
    together = JudgeScorer.from_pretrained(folder)
    seen = []
    tower = next(
        module for name, module in together.model.named_modules() if name.endswith("visual")
    )
    tower.patch_embed.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    expected = [p_yes(scorer, [pair])[0] for pair in pairs]
    np.testing.assert_allclose(p_yes(together, pairs), expected, atol=1e-5)
    p_yes(together, pairs[:1])
    p_yes(together, pairs[-1:])
    assert len(seen) == 3 and seen[0] == seen[1] + seen[2] // 2 and len(set(expected)) == 5


def test_a_pair_that_cannot_be_shown_is_an_error_and_costs_others_nothing(scorer, pairs):
    image = pairs[0].image_a
    bad = [Pair(image, image, "<|image_pad|>?"), Pair(Image.new("RGB", (1, 300)), image, "same?")]
    *errors, good = scorer.score([*bad, pairs[0]])
    assert "<|image_pad|>" in errors[0].error and "aspect ratio" in errors[1].error
    assert good.p_yes == pytest.approx(p_yes(scorer, pairs[:1])[0], abs=1e-5)
    with pytest.raises(ValueError, match="image_pad"):
        scorer.reasons(bad)
