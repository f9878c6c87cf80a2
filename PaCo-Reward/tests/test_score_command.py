"""paco-reward score: images, edits, reasons; in this process and over a server."""

import io
import math
import re
from pathlib import Path

import pytest
import torch
from bench_tools import BrightnessJudge
from fakes import fake_judge
from PIL import Image

from paco_judge import images
from paco_judge.images import UnreadableImage, load_image
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


def test_edits_have_two_scores_and_their_geometric_mean(paths, answering_judge, tiny, capsys):
    scorer = JudgeScorer.from_pretrained(answering_judge)
    assert (
        main(["score", *paths, "--model", str(answering_judge), "--instruction", "make it blue"])
        == 0
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    expected, texts = [], editing_texts(load_editing_questions(), "make it blue").values()
    for edited in (1, 2):
        verdicts = scorer.score(
            [Pair(tiny.picture(0), tiny.picture(edited), text) for text in texts]
        )
        following, consistency = (verdict.p_yes for verdict in verdicts)
        expected += [following, consistency, math.sqrt(following * consistency)]
    assert [line[-2] for line in lines] == ["prompt_following", "consistency", "overall"] * 2
    assert [float(line[-1]) for line in lines] == pytest.approx(expected, abs=1e-4)


def as_jpeg(image: Image.Image) -> Image.Image:
    """As the published script sends images: of quality 75, Pillow's default."""
    image.save(file := io.BytesIO(), "JPEG", quality=75)
    return Image.open(file)


def test_a_users_question_and_form(paths, answering_judge, tmp_path, tiny, capsys):
    """In this process as over a server: labels, JPEG and answer tokens are the scorer's."""
    (tmp_path / "mine.txt").write_text("Same {theme}?")
    command = [
        "score",
        *paths[:2],
        "--model",
        str(answering_judge),
        "--question",
        str(tmp_path / "mine.txt"),
    ]
    form = ["--image_labels", "<img{n}>: ", "--image_format", "jpeg", "--answer_tokens", "variants"]
    assert main([*command, "--theme", "boat", *form]) == 0
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
    encoded = [
        [scorer.processor.tokenizer.encode(word) for word in words]
        for words in ANSWER_TOKENS["variants"]
    ]
    ids = [sorted({tokens[0] for tokens in words if len(tokens) == 1}) for words in encoded]
    p_yes, p_no = (logits.softmax(0)[found].sum().item() for found in ids)
    assert shown == pytest.approx(p_yes / (p_yes + p_no), abs=1e-4)
    assert (
        main([*command[:-2], "--instruction", "make it blue", "--question", "editing_consistency"])
        == 0
    )
    assert capsys.readouterr().out.split()[2] == "consistency"


def test_reasons_do_not_depend_on_the_batch(paths, scorer, tiny, judge_dir, capsys):
    question = load_question("pair").text()
    pair, longer = (
        Pair(tiny.picture(i), tiny.picture(i + 1), question + " x" * 9 * i) for i in (0, 2)
    )
    expected, _ = scorer.reasons([pair, longer], 5)
    assert [expected] == scorer.reasons([pair], 5)
    # The random judge answers neither Yes nor No: its reasons are printed, but no mean.
    assert (
        main(["score", *paths[:2], "--model", str(judge_dir), "--reasons", "--reason_tokens", "5"])
        == 1
    )
    shown = capsys.readouterr()
    assert (
        expected in shown.out
        and "no score: neither Yes nor No is among the judge's top 20" in shown.out
    )
    assert "1 of 1 answers have no score" in shown.err


def test_an_adapter_is_described(paths, judge_dir, adapter_dir, caplog):
    main(["score", *paths[:2], "--model", str(judge_dir), "--adapter", str(adapter_dir)])
    assert re.search(r"adapter .*: (\d+) of \1 layers, .* rank 4, scale 2", caplog.text)


def answers(number: int, request: dict):
    if request.get("logprobs"):
        return 200, fake_judge.answer(0.8), {}
    assert request["max_tokens"] == 40
    return (
        200,
        {"choices": [{"message": {"role": "assistant", "content": "Yes. Both are boats."}}]},
        {},
    )


def test_images_by_url_over_a_server(paths, capsys, monkeypatch):
    """Files take the place of the web."""
    content = lambda url, timeout: io.BytesIO(Path(paths[int(url[-5])]).read_bytes())
    monkeypatch.setattr(images.urllib.request, "urlopen", content)
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with fake_judge.FakeJudge(answers) as server:
        arguments = [
            "score",
            "http://a.b/0.png",
            "https://a.b/1.png",
            "--server",
            server.url,
            "--api_key_env",
            "JUDGE_KEY",
        ]
        assert main([*arguments, "--reasons", "--reason_tokens", "40"]) == 0
        assert {headers.get("authorization") for headers in server.headers} == {"Bearer secret"}
    text = capsys.readouterr().out
    assert "0.8000" in text and "    Yes. Both are boats." in text
    monkeypatch.setattr(images, "_LARGEST_DOWNLOAD", 100)
    with pytest.raises(UnreadableImage, match="larger than"):
        load_image("http://a.b/0.png")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["score", "A", "B", "--server", "http://127.0.0.1:9"], "vllm_server/launch.sh"),
        (
            ["score", "A", "B", "--server", "http://127.0.0.1:9", "--api_key_env", "NO_KEY"],
            "NO_KEY",
        ),
        (["score", "A", "B"], "--model"),
        (["score", "A", "--model", "x/y"], "two"),
        (["score", "A", "nowhere.png", "--model", "x/y"], "nowhere.png"),
        (
            ["score", "A", "B", "--theme", "<|image_pad|>", "--model", "JUDGE", "--reasons"],
            "<|image_pad|>",
        ),
        (["score", "A", "THIN", "--model", "JUDGE", "--reasons"], "aspect ratio"),
        (["export", "--base", "./no", "--adapter", "a", "--output", "o"], "./no"),
        (["score", "A", "B", "--model", "./no"], "neither an existing folder nor a name"),
        (["score", "A", "B", "--model", "org/no"], "hf download org/no"),
        (["score", "A", "B", "--model", "JUDGE", "--adapter", "org/no"], "hf download org/no"),
        (["score", "A", "B", "--model", "JUDGE", "--adapter", "./no"], "neither an existing"),
        (
            ["score", "A", "B", "--server", "http://127.0.0.1:9", "--html", "A/page.html"],
            "0.png",  # found before the server is missed
        ),
        (
            ["score", "A", "B", "--model", "JUDGE", "--instruction", "x"]
            + ["--question", "editing_instruction", "editing_consistency"],
            "in the place of",
        ),
    ],
)
def test_problems_are_one_line(paths, judge_dir, tmp_path, arguments, named, capsys):
    Image.new("RGB", (1, 300)).save(tmp_path / "thin.png")
    places = {
        "A": paths[0],
        "B": paths[1],
        "THIN": str(tmp_path / "thin.png"),
        "JUDGE": str(judge_dir),
    }
    places["A/page.html"] = f"{paths[0]}/page.html"
    assert main([places.get(argument, argument) for argument in arguments]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and named in error


def test_ctrl_c_is_one_line(paths, capsys, monkeypatch):
    monkeypatch.setattr("paco_reward.score.load_image", BrightnessJudge(stop_after=0))
    assert (
        main(["score", *paths, "--model", "x/y"]) == 130
        and capsys.readouterr().err == "interrupted\n"
    )
