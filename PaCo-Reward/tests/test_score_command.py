"""paco-reward score: images, edits, reasons; in this process and over a server."""

import io
from itertools import combinations

import numpy as np
import pytest
from fakes import fake_judge
from pairing_tools import digest, judge_model, p_yes_of
from PIL import Image

from paco_judge import Judge
from paco_judge.questions import Pair, RequestForm, load_question
from paco_judge.scorer import JudgeScorer
from paco_reward.cli import main


@pytest.fixture
def paths(tiny, tmp_path) -> list[str]:
    names = [str(tmp_path / f"{number}.png") for number in range(3)]
    for number, path in enumerate(names):
        tiny.picture(number).save(path)
    return names


def score(*words) -> int:
    return main(["score", *map(str, words)])


def test_edits_have_two_scores_and_their_geometric_mean(paths, answering_judge, capsys):
    options = ["--model", answering_judge]
    assert score(*paths, *options, "--instruction", "make it blue") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-2] for line in lines] == ["prompt_following", "consistency", "overall"] * 2
    values = np.array([float(line[-1]) for line in lines]).reshape(2, 3)
    overall = Judge.from_pretrained(answering_judge).score_edit(paths[0], paths[1:], "make it blue")
    np.testing.assert_allclose(values[:, 2], overall, atol=1e-4)
    np.testing.assert_allclose(np.sqrt(values[:, 0] * values[:, 1]), values[:, 2], atol=1e-4)
    assert len(set(values[:, 2])) == 2


def test_a_users_adapter_question_and_form(paths, answering_judge, adapter_dir, tmp_path, capsys):
    """In this process as over a server: labels, JPEG and answer tokens are the scorer's."""
    question = tmp_path / "mine.txt"
    question.write_text("Same {theme}?")
    options = ["--model", answering_judge, "--adapter", adapter_dir]
    options += ["--question", question, "--theme", "boat"]
    form = ["--image_labels", "<img{n}>: ", "--image_format", "jpeg", "--answer_tokens", "variants"]
    assert score(*paths[:2], *options, *form) == 0
    shown = float(capsys.readouterr().out.split()[-1])
    pictures = []
    for path in paths[:2]:
        file = io.BytesIO()
        Image.open(path).save(file, "JPEG", quality=75)  # as the published script sends images
        pictures.append(Image.open(file))
    labeled = RequestForm("<img{n}>: ", "png", "variants")
    scorer = JudgeScorer.from_pretrained(answering_judge, adapter_dir, form=labeled)
    (verdict,) = scorer.score([Pair(*pictures, "Same boat?")])
    assert shown == pytest.approx(verdict.p_yes, abs=5e-5)


def test_scores_and_reasons_of_a_server(paths, capsys, monkeypatch):
    """Of all pairs of three images."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    model = "mine"  # the only one
    with fake_judge.FakeJudge(judge_model, models=[model]) as server:
        assert score(*paths, "--server", server.url, "--reasons", "--reason_tokens", "40") == 0
        assert {headers["authorization"] for headers in server.headers} == {"Bearer secret"}
        assert {request["max_tokens"] for request in server.requests} == {1, 40}
    *lines, mean = capsys.readouterr().out.splitlines()
    digests = {path: digest(Image.open(path)) for path in paths}
    question = load_question("pair").text()
    scores = []
    for pair, row, reason in zip(combinations(paths, 2), lines[::2], lines[1::2], strict=True):
        first, second = map(digests.get, pair)
        scores.append(p_yes_of(first, second, question, model))
        assert row.split() == [*pair, f"{scores[-1]:.4f}"]
        assert second[:6] in reason
    assert mean.split()[-1] == f"{np.mean(scores):.4f}"
