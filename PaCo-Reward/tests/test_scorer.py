"""The in-process scorer, and the commands that use it."""

import json

import numpy as np
import pytest
import torch

from paco_judge.client import Pair
from paco_judge.questions import theme_question
from paco_judge.verdict import p_yes_from_logits
from paco_reward.cli import main
from paco_reward.datasets import labeled_pairs
from paco_reward.errors import PacoRewardError
from paco_reward.metrics import judge_report
from paco_reward.scorer import JudgeScorer, open_image


def p_yes(scorer, pairs):
    return np.array([verdict.p_yes for verdict in scorer.score(pairs)])


@pytest.fixture(scope="module")
def mixed_pairs(tiny):
    """Pairs whose questions differ in length, so that a batch needs padding."""
    themes = [*tiny.THEMES, "x", "a paper boat " * 12]
    return [Pair(tiny.picture(i), tiny.picture(i + 50), theme_question(theme)) for i, theme in enumerate(themes)]


def test_a_score_does_not_depend_on_its_batch(scorer, mixed_pairs):
    alone = np.array([p_yes(scorer, [pair])[0] for pair in mixed_pairs])
    scorer.batch_size = len(mixed_pairs)
    together, backwards = p_yes(scorer, mixed_pairs), p_yes(scorer, mixed_pairs[::-1])[::-1]
    scorer.batch_size = 4
    assert alone.std() > 1e-4  # the judge distinguishes them
    np.testing.assert_allclose(together, alone, atol=1e-5)
    np.testing.assert_allclose(backwards, alone, atol=1e-5)


def test_the_score_is_the_softmax_over_yes_and_no_of_a_plain_forward(scorer, mixed_pairs):
    pair = mixed_pairs[0]
    inputs = scorer.processor(
        text=[scorer.prompt(pair.question)], images=[pair.image_a, pair.image_b], return_tensors="pt"
    )
    with torch.no_grad():
        logits = scorer.model(**inputs).logits[0, -1].double().numpy()
    ids = [scorer.processor.tokenizer.convert_tokens_to_ids(word) for word in ("Yes", "No")]
    yes, no = np.exp(logits[ids] - logits.max())
    assert p_yes(scorer, [pair])[0] == pytest.approx(yes / (yes + no), abs=1e-6)
    assert p_yes_from_logits(logits, *ids) == pytest.approx(yes / (yes + no), abs=1e-9)


def test_non_finite_logits_are_a_missing_score(scorer, mixed_pairs, monkeypatch):
    logits = np.zeros((1, len(scorer.processor.tokenizer)), dtype=np.float32)
    logits[0, scorer.yes_id] = np.nan
    monkeypatch.setattr(scorer, "first_token_logits", lambda pairs: logits)
    (verdict,) = scorer.score(mixed_pairs[:1])
    assert verdict.p_yes is None and "not finite" in verdict.error


def test_top_limits_the_counted_tokens_as_a_server_does(scorer, mixed_pairs):
    logits = scorer.first_token_logits(mixed_pairs[:2])
    for pair, row in zip(mixed_pairs[:2], logits, strict=True):
        rank = (
            int((row > max(row[scorer.yes_id], row[scorer.no_id])).sum()) + 1
        )  # the first of the two is the rank-th token
        (whole,), (enough,), (few,) = (scorer.score([pair], top=top) for top in (None, len(row), rank - 1))
        assert enough.p_yes == pytest.approx(whole.p_yes, abs=1e-5)
        assert few.p_yes is None and f"top {rank - 1} tokens" in few.error


def test_images_by_path_and_in_memory(scorer, tiny, tmp_path):
    pictures = [tiny.picture(i) for i in range(3)]
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for picture, path in zip(pictures, paths):
        picture.save(path)
    by_path = scorer.image_pairs(paths, "a paper boat")
    assert len(by_path) == 3
    np.testing.assert_array_equal(p_yes(scorer, by_path), p_yes(scorer, scorer.image_pairs(pictures, "a paper boat")))
    with pytest.raises(PacoRewardError, match="nowhere.png does not exist"):
        open_image(tmp_path / "nowhere.png")
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(PacoRewardError, match="text.png is not an image"):
        open_image(tmp_path / "text.png")


def test_accuracy_command(scorer, judge_dir, data_dir, tmp_path, capsys):
    output = tmp_path / "new" / "judge.json"
    arguments = ["accuracy", "--model", str(judge_dir), "--dataset_dir", str(data_dir), "--dataset", "held_out"]
    assert main([*arguments, "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert json.loads(capsys.readouterr().out) == report
    pairs, labels = labeled_pairs(data_dir, "held_out")
    expected = judge_report(p_yes(scorer, pairs), labels)
    assert labels == [True, False] * 5 and report["n"] == 10 and report["missing"] == 0
    assert {name: report[name] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_adapter_must_exist(judge_dir, tmp_path):
    with pytest.raises(PacoRewardError, match="adapter_config.json"):
        JudgeScorer.from_pretrained(judge_dir, tmp_path)
