"""paco-reward score: images, edits, reasons; in this process and over a server."""

import io

import numpy as np
import pytest
import torch
from fakes import fake_judge
from PIL import Image

from paco_judge import Judge
from paco_judge.questions import Pair
from paco_judge.scorer import JudgeScorer
from paco_judge.verdict import ANSWER_TOKENS
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
    options += ["--instruction", "make it blue", "--question", "editing_consistency"]
    assert score(*paths[:2], *options) == 0
    _, _, dimension, value = capsys.readouterr().out.split()
    assert (dimension, float(value)) == ("consistency", values[0, 1])


def test_a_users_question_and_form(paths, answering_judge, tmp_path, capsys):
    """In this process as over a server: labels, JPEG and answer tokens are the scorer's."""
    question = tmp_path / "mine.txt"
    question.write_text("Same {theme}?")
    options = ["--model", answering_judge, "--question", question, "--theme", "boat"]
    form = ["--image_labels", "<img{n}>: ", "--image_format", "jpeg", "--answer_tokens", "variants"]
    assert score(*paths[:2], *options, *form) == 0
    shown = float(capsys.readouterr().out.split()[-1])
    scorer = JudgeScorer.from_pretrained(answering_judge)
    pictures = []
    for path in paths[:2]:
        file = io.BytesIO()
        Image.open(path).save(file, "JPEG", quality=75)  # as the published script sends images
        pictures.append(Image.open(file))
    before, first, second = scorer.prompt(
        scorer.chat(Pair(*pictures, "Same boat?")).messages
    ).split("<|vision_start|>")
    prompt = f"{before}<img1>: <|vision_start|>{first}<img2>: <|vision_start|>{second}"
    inputs = scorer.processor(text=[prompt], images=pictures, return_tensors="pt")
    with torch.no_grad():
        probabilities = scorer.model(**inputs).logits[0, -1].double().softmax(0)
    sums = []
    for words in ANSWER_TOKENS["variants"]:
        encoded = [scorer.processor.tokenizer.encode(word) for word in words]
        tokens = {token_ids[0] for token_ids in encoded if len(token_ids) == 1}
        sums.append(probabilities[sorted(tokens)].sum().item())
    assert shown == pytest.approx(sums[0] / sum(sums), abs=1e-4)


def answers(number: int, request: dict):
    if request.get("logprobs"):
        return 200, fake_judge.answer(0.8), {}
    assert request["max_tokens"] == 40
    message = {"role": "assistant", "content": "Yes. Both are boats."}
    return 200, {"choices": [{"message": message}]}, {}


def test_scores_and_reasons_of_a_server(paths, capsys, monkeypatch):
    """With a key from a variable that is named, or the judge's own."""
    monkeypatch.setenv("JUDGE_KEY", "secret")
    monkeypatch.setenv("VLLM_API_KEY", "the server's")
    for named, key in (([], "the server's"), (["--api_key_env", "JUDGE_KEY"], "secret")):
        with fake_judge.FakeJudge(answers) as server:
            options = ["--server", server.url, "--reasons", "--reason_tokens", "40", *named]
            assert score(*paths[:2], *options) == 0
            sent = {headers.get("authorization") for headers in server.headers}
            assert sent == {f"Bearer {key}"}
        shown = capsys.readouterr().out
        assert "0.8000" in shown and "    Yes. Both are boats." in shown


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["A", "B", "--server", "http://127.0.0.1:9"], "vllm_server/launch.sh"),
        (["A", "B", "--server", "http://127.0.0.1:9", "--api_key_env", "NO_KEY"], "NO_KEY"),
        (["A", "B"], "--model"),
        (["A", "--model", "x/y"], "two"),
        (["A", "nowhere.png", "--model", "x/y"], "nowhere.png"),
        (["A", "B", "--model", "JUDGE", "--reasons", "--reason_tokens", "1"], "1 of 1"),
        (["A", "B", "--model", "org/no"], "hf download org/no"),
        (["A", "B", "--model", "JUDGE", "--adapter", "./no"], "./no"),
    ],
)
def test_problems_are_one_line(paths, judge_dir, arguments, named, capsys):
    """The random judge answers neither Yes nor No: its reasons are printed, but no mean."""
    places = {"A": paths[0], "B": paths[1], "JUDGE": str(judge_dir)}
    assert score(*(places.get(argument, argument) for argument in arguments)) == 1
    shown = capsys.readouterr()
    error = shown.err.strip().splitlines()[-1]
    assert error.startswith("error: ") and named in error
    assert ("no score: " in shown.out) == ("--reasons" in arguments)
