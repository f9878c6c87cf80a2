"""paco-reward score: images, edits, reasons; in this process and over a server."""

import io
import math
from pathlib import Path

import pytest
import torch
from fakes import fake_judge
from PIL import Image

from paco_judge import images
from paco_judge.questions import Pair, editing_texts, load_editing_questions, load_question
from paco_judge.scorer import JudgeScorer
from paco_judge.verdict import ANSWER_TOKENS
from paco_reward.cli import main


@pytest.fixture
def paths(tiny, tmp_path):
    names = [str(tmp_path / f"{i}.png") for i in range(3)]
    for index, path in enumerate(names):
        tiny.picture(index).save(path)
    return names


def score(*words) -> int:
    return main(["score", *map(str, words)])


def test_edits_have_two_scores_and_their_geometric_mean(paths, answering_judge, tiny, capsys):
    assert score(*paths, "--model", answering_judge, "--instruction", "make it blue") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    scorer = JudgeScorer.from_pretrained(answering_judge)
    texts = editing_texts(load_editing_questions(), "make it blue").values()
    expected = []
    for edited in (1, 2):
        pairs = [Pair(tiny.picture(0), tiny.picture(edited), text) for text in texts]
        following, consistency = [verdict.p_yes for verdict in scorer.score(pairs)]
        expected += [following, consistency, math.sqrt(following * consistency)]
    assert [line[-2] for line in lines] == ["prompt_following", "consistency", "overall"] * 2
    assert [float(line[-1]) for line in lines] == pytest.approx(expected, abs=1e-4)


def as_jpeg(image: Image.Image) -> Image.Image:
    """As the published script sends images: of quality 75, Pillow's default."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=75)
    return Image.open(file)


def single_tokens(tokenizer, words) -> list[int]:
    """The tokens of the words that are one token each."""
    encoded = [tokenizer.encode(word) for word in words]
    return sorted({tokens[0] for tokens in encoded if len(tokens) == 1})


def test_a_users_question_and_form(paths, answering_judge, tmp_path, tiny, capsys):
    """In this process as over a server: labels, JPEG and answer tokens are the scorer's."""
    question = tmp_path / "mine.txt"
    question.write_text("Same {theme}?")
    command = [*paths[:2], "--model", answering_judge]
    form = ["--image_labels", "<img{n}>: ", "--image_format", "jpeg", "--answer_tokens", "variants"]
    assert score(*command, "--question", question, "--theme", "boat", *form) == 0
    shown = float(capsys.readouterr().out.split()[-1])
    scorer = JudgeScorer.from_pretrained(answering_judge)
    pictures = [as_jpeg(tiny.picture(i)) for i in range(2)]
    prompt = scorer.prompt(scorer.chat(Pair(*pictures, "Same boat?")).messages)
    for number in (1, 2):
        prompt = prompt.replace("<|vision_start|>", f"<img{number}>: <|vision_START|>", 1)
    prompt = prompt.replace("START", "start")
    inputs = scorer.processor(text=[prompt], images=pictures, return_tensors="pt")
    with torch.no_grad():
        logits = scorer.model(**inputs).logits[0, -1].double()
    yes_words, no_words = ANSWER_TOKENS["variants"]
    probabilities = logits.softmax(0)
    p_yes = probabilities[single_tokens(scorer.processor.tokenizer, yes_words)].sum().item()
    p_no = probabilities[single_tokens(scorer.processor.tokenizer, no_words)].sum().item()
    assert shown == pytest.approx(p_yes / (p_yes + p_no), abs=1e-4)

    edit = ["--instruction", "make it blue", "--question", "editing_consistency"]
    assert score(*command, *edit) == 0
    assert capsys.readouterr().out.split()[2] == "consistency"


def test_reasons_do_not_depend_on_the_batch(paths, scorer, tiny, judge_dir, capsys):
    question = load_question("pair").text()
    pair = Pair(tiny.picture(0), tiny.picture(1), question)
    longer = Pair(tiny.picture(2), tiny.picture(3), question + " x" * 18)
    expected, _ = scorer.reasons([pair, longer], 5)
    assert expected.text and [expected] == scorer.reasons([pair], 5)
    # The random judge answers neither Yes nor No: its reasons are printed, but no mean.
    reasons = ["--reasons", "--reason_tokens", "5"]
    assert score(*paths[:2], "--model", judge_dir, *reasons) == 1
    shown = capsys.readouterr()
    assert expected.text in shown.out
    assert "no score: neither Yes nor No is among the judge's top 20" in shown.out
    assert "1 of 1 answers have no score" in shown.err


def answers(number: int, request: dict):
    if request.get("logprobs"):
        return 200, fake_judge.answer(0.8), {}
    assert request["max_tokens"] == 40
    message = {"role": "assistant", "content": "Yes. Both are boats."}
    return 200, {"choices": [{"message": message}]}, {}


def test_images_by_url_over_a_server(paths, capsys, monkeypatch):
    """Files take the place of the web."""

    def content(url, timeout):
        return io.BytesIO(Path(paths[int(url[-5])]).read_bytes())

    monkeypatch.setattr(images.urllib.request, "urlopen", content)
    monkeypatch.setenv("JUDGE_KEY", "secret")
    urls = ["http://a.b/0.png", "https://a.b/1.png"]
    options = ["--api_key_env", "JUDGE_KEY", "--reasons", "--reason_tokens", "40"]
    with fake_judge.FakeJudge(answers) as server:
        assert score(*urls, "--server", server.url, *options) == 0
        assert {headers.get("authorization") for headers in server.headers} == {"Bearer secret"}
    text = capsys.readouterr().out
    monkeypatch.setenv("VLLM_API_KEY", "of the judge's server")
    with fake_judge.FakeJudge(answers) as server:
        assert score(*urls, "--server", server.url) == 0
        sent = {headers.get("authorization") for headers in server.headers}
        assert sent == {"Bearer of the judge's server"}
    assert "0.8000" in text
    assert "    Yes. Both are boats." in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["A", "B", "--server", "http://127.0.0.1:9"], "vllm_server/launch.sh"),
        (["A", "B", "--server", "http://127.0.0.1:9", "--api_key_env", "NO_KEY"], "NO_KEY"),
        (["A", "B"], "--model"),
        (["A", "--model", "x/y"], "two"),
        (["A", "nowhere.png", "--model", "x/y"], "nowhere.png"),
        (["A", "B", "--theme", "<|image_pad|>", "--model", "JUDGE"], "1 of 1"),
        (["A", "B", "--model", "org/no"], "hf download org/no"),
        (["A", "B", "--model", "JUDGE", "--adapter", "./no"], "./no"),
    ],
)
def test_problems_are_one_line(paths, judge_dir, arguments, named, capsys):
    places = {"A": paths[0], "B": paths[1], "JUDGE": str(judge_dir)}
    assert score(*(places.get(argument, argument) for argument in arguments)) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert named in error


@pytest.mark.parametrize(("theme", "width"), [("<|image_pad|>", 32), ("boats", 1)])
def test_what_the_judge_cannot_be_shown_is_said(paths, judge_dir, tmp_path, theme, width, capsys):
    Image.new("RGB", (width, 300)).save(tmp_path / "bad.png")
    options = ["--theme", theme, "--model", judge_dir, "--reasons"]
    assert score(paths[0], tmp_path / "bad.png", *options) == 1
    shown = capsys.readouterr().out
    assert ("aspect ratio" if width == 1 else theme) in shown and "no answer: " in shown
