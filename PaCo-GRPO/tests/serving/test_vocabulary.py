"""A judge with Qwen's own 151,669 tokens: trained, merged, served; where its tokenizer is at hand."""

import numpy as np
import pytest
import tiny_judge
from PIL import Image
from serving_tools import VLLM_PYTHON
from training_tools import train_config

from paco_judge.client import JudgeClient, Pair
from paco_judge.questions import theme_question
from paco_judge.scorer import JudgeScorer
from paco_reward import launch, overlay
from paco_reward.export import export

YES = 9454
NO = 2753
# Ligatures, three scripts, an emoji, quotes and a line break, which split into unlike tokens.
THEME = 'one \N{LATIN SMALL LIGATURE FI}re "fox" in \u56db\u5b63 / \u0432\u0435\u0441\u043d\u043e\u0439 \N{FOX FACE}\nagain'


def pairs_of(*sizes: tuple[int, int]) -> list[Pair]:
    """Noise of two sizes each, so that no two pairs are alike."""
    rng = np.random.default_rng(0)
    images = []
    for width, height in sizes:
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        images.append(Image.fromarray(pixels))
    pairs = []
    for number, image in enumerate(images):
        other = tiny_judge.picture(number, 60 + 17 * number)
        couple = (image, other) if number % 2 else (other, image)
        theme = THEME if number < 2 else f"{number} boats"
        pairs.append(Pair(*couple, theme_question(theme)))
    return pairs


PAIRS = pairs_of((37, 301), (1500, 60), (90, 200), (512, 33))


@pytest.fixture(scope="module")
def judge(qwen_tokenizer, tmp_path_factory):
    return tiny_judge.save_qwen_judge(tmp_path_factory.mktemp("qwen"), qwen_tokenizer)


@pytest.fixture(scope="module")
def trained(judge, tmp_path_factory):
    """Folder of an adapter after two steps, of its merged model, and the labels of the training."""
    folder = tmp_path_factory.mktemp("trained")
    data = tiny_judge.save_pairs(folder / "data", 8)
    seen = []
    loss = overlay.first_token_loss_func

    def observed(outputs, labels, *others, **settings):
        seen.extend(row[row != -100].tolist() for row in labels)
        return loss(outputs, labels, *others, **settings)

    config = train_config(judge, data, folder / "adapter", first_token_weight=0.3)
    config |= {"cutoff_len": 1024, "learning_rate": 0.2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlay, "first_token_loss_func", observed)
        launch.train(config)
    export(str(judge), str(folder / "adapter"), folder / "merged")
    return folder, seen


def test_an_answer_begins_with_one_token(trained, qwen_tokenizer):
    _, labels = trained
    assert [row[0] for row in labels] == [YES, NO] * 8
    tokenizer = tiny_judge.Qwen2Tokenizer.from_pretrained(qwen_tokenizer)
    texts = {tokenizer.decode(row).strip() for row in labels}
    assert any(text.startswith("Yes. the colour") for text in texts)


def p_yes(scorer: JudgeScorer, pairs: list[Pair]) -> np.ndarray:
    return np.array([verdict.p_yes for verdict in scorer.score(pairs, top=20)], float)


def test_a_trained_judge_answers_the_same_merged(judge, trained):
    """Also alone and in batches of pairs of other sizes."""
    folder, _ = trained
    expected = p_yes(JudgeScorer.from_pretrained(judge, folder / "adapter"), PAIRS)
    assert np.diff(np.sort(expected)).min() > 1e-4
    assert np.abs(expected - p_yes(JudgeScorer.from_pretrained(judge), PAIRS)).max() > 1e-3
    merged = JudgeScorer.from_pretrained(folder / "merged", batch_size=1)
    np.testing.assert_allclose(p_yes(merged, PAIRS), expected, atol=1e-5)


@pytest.mark.long
@pytest.mark.timeout(1000)
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="vLLM environment not installed")
def test_a_trained_judge_answers_the_same_over_vllm(judge, trained, shell):
    pairs = [*PAIRS, *pairs_of((1000, 1500), (1400, 300), (28, 28))]
    folder, _ = trained
    real = {"VLLM_PYTHON": str(VLLM_PYTHON), "VLLM_START_TIMEOUT": "800"}
    assert "Engine: vllm" in shell.launch(VLLM_MODEL_PATHS=str(folder / "merged"), **real)
    verdicts = JudgeClient(shell.url, model="judge", deadline_s=300).score(pairs)
    expected = p_yes(JudgeScorer.from_pretrained(judge, folder / "adapter", batch_size=1), pairs)
    np.testing.assert_allclose([verdict.p_yes for verdict in verdicts], expected, atol=1e-5)
