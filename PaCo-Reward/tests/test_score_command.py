"""paco-reward score: images, edits, reasons; in this process and over a server."""

import io

import numpy as np
import pytest
from fakes import fake_judge
from PIL import Image

from paco_judge import Judge
from paco_judge.questions import Pair, RequestForm
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
    judge = Judge.from_pretrained(answering_judge)
    overall = judge.score_edit(paths[0], paths[1:], "make it blue")
    assert [line[-2] for line in lines] == ["prompt_following", "consistency", "overall"] * 2
    values = np.array([float(line[-1]) for line in lines]).reshape(2, 3)
    np.testing.assert_allclose(values[:, 2], overall, atol=1e-4)
    np.testing.assert_allclose(np.sqrt(values[:, 0] * values[:, 1]), overall, atol=1e-4)


def test_a_users_question_and_form(paths, answering_judge, tmp_path, capsys):
    """In this process as over a server: labels, JPEG and answer tokens are the scorer's."""
    question = tmp_path / "mine.txt"
    question.write_text("Same {theme}?")
    options = ["--model", answering_judge, "--question", question, "--theme", "boat"]
    form = ["--image_labels", "<img{n}>: ", "--image_format", "jpeg", "--answer_tokens", "variants"]
    assert score(*paths[:2], *options, *form) == 0
    shown = float(capsys.readouterr().out.split()[-1])
    pictures = []
    for path in paths[:2]:
        file = io.BytesIO()
        Image.open(path).save(file, "JPEG", quality=75)  # as the published script sends images
        pictures.append(Image.open(file))
    labeled = RequestForm("<img{n}>: ", "png", "variants")
    scorer = JudgeScorer.from_pretrained(answering_judge, form=labeled)
    (verdict,) = scorer.score([Pair(*pictures, "Same boat?")])
    assert shown == pytest.approx(verdict.p_yes, abs=5e-5)


def answers(number: int, request: dict):
    if request.get("logprobs"):
        return 200, fake_judge.answer(0.8), {}
    assert request["max_tokens"] == 40
    message = {"role": "assistant", "content": "Yes. Both are boats."}
    return 200, {"choices": [{"message": message}]}, {}


def test_scores_and_reasons_of_a_server(paths, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with fake_judge.FakeJudge(answers) as server:
        options = ["--server", server.url, "--reasons", "--reason_tokens", "40"]
        assert score(*paths[:2], *options) == 0
        assert {headers["authorization"] for headers in server.headers} == {"Bearer secret"}
    shown = capsys.readouterr().out
    assert "0.8000" in shown and "    Yes. Both are boats." in shown
