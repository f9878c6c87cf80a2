"""The scorer against a plain forward of transformers, for each family, on random weights."""

import numpy as np
import pytest
import tiny_judge
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from paco_judge.questions import Pair, theme_question
from paco_judge.scorer import JudgeScorer, answer_ids
from paco_judge.verdict import ANSWER_TOKENS


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    folder = tmp_path_factory.mktemp("judges") / family
    if family == "llava":
        return tiny_judge.save_other_judge(folder)
    if family == "qwen2_5_vl":
        return tiny_judge.save_judge(folder)
    return tiny_judge.save_new_judge(folder, family)


@pytest.fixture(scope="module")
def scorer(folder):
    return JudgeScorer.from_pretrained(folder, batch_size=2)


@pytest.fixture(scope="module")
def pairs():
    """Questions and images of different lengths and sizes, so that a batch needs padding."""
    pairs = []
    for seed, theme in enumerate([*tiny_judge.THEMES, "a paper boat " * 12]):
        first = tiny_judge.picture(seed, 40 + 9 * seed)
        pairs.append(Pair(first, tiny_judge.picture(seed + 50), theme_question(theme)))
    return pairs


def p_yes(scorer, pairs):
    """Also where Yes and No are not among the most probable tokens of random weights."""
    return np.array([verdict.p_yes for verdict in scorer.score(pairs, top=None)])


def test_a_score_is_the_softmax_over_yes_and_no_of_a_plain_forward_whatever_its_batch(
    scorer, pairs
):
    expected = []
    for pair in pairs:
        text = scorer.prompt(scorer.chat(pair).messages)
        inputs = scorer.processor(text=[text], images=list(pair.images), return_tensors="pt")
        with torch.no_grad():
            logits = scorer.model(**inputs).logits[0, -1].double()
        expected.append(torch.sigmoid(logits[scorer.yes_ids[0]] - logits[scorer.no_ids[0]]).item())
    assert np.ptp(expected) > 1e-2  # the judge distinguishes them
    np.testing.assert_allclose(p_yes(scorer, pairs), expected, atol=1e-5)
    np.testing.assert_allclose(p_yes(scorer, pairs[::-1])[::-1], expected, atol=1e-5)
    chats = [scorer.chat(pair) for pair in pairs[:3]]
    _, logits = scorer.generate(chats, 2)
    np.testing.assert_allclose(logits, scorer.first_token_logits(chats), atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
def test_a_models_own_sampling_defaults_do_not_count(scorer, pairs, monkeypatch):
    """Qwen2.5-VL's repetition penalty would make other answers than vLLM's."""
    answers = scorer.reasons(pairs, 12)
    monkeypatch.setattr(scorer.model.generation_config, "repetition_penalty", 1.7)
    assert scorer.reasons(pairs, 12) == answers


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
def test_a_pair_that_cannot_be_shown_is_an_error_and_costs_others_nothing(scorer, pairs):
    image = pairs[0].image_a
    bad = [Pair(image, image, "<|image_pad|>?"), Pair(Image.new("RGB", (1, 300)), image, "same?")]
    bad.append(Pair(image, image, "a fox " * 2000))
    asked = [pairs[0], *bad, pairs[1]]
    first, *errors, last = scorer.score(asked, top=None)
    assert "<|image_pad|>" in errors[0].error and "aspect ratio" in errors[1].error
    assert "more than the 2048" in errors[2].error
    expected = p_yes(scorer, pairs[:2])
    np.testing.assert_allclose([first.p_yes, last.p_yes], expected, atol=1e-5)


def test_only_words_of_one_token_are_answers():
    tokenizer = tiny_judge.make_processor().tokenizer
    for form, words in ANSWER_TOKENS.items():
        for ids, names in zip(answer_ids(tokenizer, form), words, strict=True):
            assert {tokenizer.decode([number]) for number in ids} <= set(names)
    letters = {letter: number for number, letter in enumerate("YesNo")}
    splits = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(letters, [])))
    with pytest.raises(ValueError, match="Yes or No"):
        answer_ids(splits)


@pytest.mark.parametrize(("has_gpu", "dtype"), [(True, "auto"), (False, torch.float32)])
def test_weights_are_loaded_as_stored_on_a_gpu_and_in_float32_on_a_cpu(monkeypatch, has_gpu, dtype):
    """A 7B judge in float32 takes twice the memory of a GPU, and no score shows it."""

    def load(model_class, path, **options):
        assert options["dtype"] == dtype
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr("paco_judge.scorer.from_pretrained_strict", load)
    with pytest.raises(InterruptedError):
        JudgeScorer.from_pretrained(tiny_judge.TOY_JUDGE)
