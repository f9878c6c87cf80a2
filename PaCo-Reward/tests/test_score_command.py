"""paco-reward score: images, edits, reasons; in this process and over a server."""

import functools
import http.server
import math
import threading

import numpy as np
import pytest
from pairing_tools import fake_judge

from paco_judge.client import Pair
from paco_judge.questions import editing_questions, pair_question
from paco_reward import images
from paco_reward.cli import main
from paco_reward.errors import PacoRewardError
from paco_reward.images import open_image
from paco_reward.scorer import JudgeScorer


@pytest.fixture
def paths(tiny, tmp_path):
    names = [str(tmp_path / f"{i}.png") for i in range(3)]
    for index, path in enumerate(names):
        tiny.picture(index).save(path)
    return names


@pytest.fixture
def web(paths, tmp_path):
    """The folder of the images over HTTP."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def numbers(line: str, count: int) -> list[float]:
    return [float(cell) for cell in line.split()[-count:]]


def test_all_pairs_and_their_mean(paths, answering_judge, capsys):
    assert main(["score", *paths, "--model", str(answering_judge), "--theme", "a paper boat"]) == 0
    lines = capsys.readouterr().out.splitlines()
    values = [numbers(line, 1)[0] for line in lines]
    assert len(lines) == 4 and lines[-1].startswith("mean")
    assert values[-1] == pytest.approx(np.mean(values[:-1]), abs=1e-4)


def test_images_by_url_score_as_files(paths, web, answering_judge, capsys, monkeypatch):
    assert main(["score", *paths[:2], "--model", str(answering_judge)]) == 0
    by_path = capsys.readouterr().out.splitlines()
    assert main(["score", f"{web}/0.png", f"{web}/1.png", "--model", str(answering_judge)]) == 0
    by_url = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in by_path] == [line.split()[-1] for line in by_url]
    with pytest.raises(PacoRewardError, match=r"nowhere\.png cannot be fetched.*404"):
        open_image(f"{web}/nowhere.png")
    monkeypatch.setattr(images, "LARGEST_DOWNLOAD", 100)
    with pytest.raises(PacoRewardError, match="larger than"):
        open_image(f"{web}/0.png")


def test_edits_have_two_scores_and_their_geometric_mean(paths, answering_judge, tiny, capsys):
    scorer = JudgeScorer.from_pretrained(answering_judge)
    assert main(["score", *paths, "--model", str(answering_judge), "--instruction", "make it blue"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["edit", "prompt_following", "consistency", "overall"] and len(lines) == 2
    for line, edited in zip(lines, (1, 2), strict=True):
        pairs = [
            Pair(tiny.picture(0), tiny.picture(edited), question) for question in editing_questions("make it blue")
        ]
        consistency, following = (verdict.p_yes for verdict in scorer.score(pairs))
        assert numbers(line, 3) == pytest.approx([following, consistency, math.sqrt(following * consistency)], abs=1e-4)


def test_reasons_are_greedy_decoding(paths, scorer, tiny, judge_dir, capsys):
    """Against decoding by hand, without batch, padding or cache."""
    import torch

    pair = Pair(tiny.picture(0), tiny.picture(1), pair_question())
    inputs = dict(scorer.inputs([pair]))
    start = inputs["input_ids"].shape[1]
    for _ in range(5):
        with torch.no_grad():
            token = scorer.model(**inputs, use_cache=False).logits[0, -1].argmax().view(1, 1)
        inputs["input_ids"] = torch.cat([inputs["input_ids"], token], 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, 1))
        if token.item() == scorer.processor.tokenizer.eos_token_id:
            break
    expected = scorer.processor.tokenizer.decode(inputs["input_ids"][0, start:], skip_special_tokens=True).strip()
    assert scorer.reasons([pair, Pair(tiny.picture(2), tiny.picture(3), pair_question() + " x" * 9)], 5)[0] == expected
    # The random judge answers neither Yes nor No: its reasons are printed, but no mean.
    assert main(["score", *paths[:2], "--model", str(judge_dir), "--reasons", "--reason_tokens", "5"]) == 1
    shown = capsys.readouterr()
    assert expected in shown.out and "no score: neither Yes nor No is among the judge's top 20" in shown.out
    assert "1 of 1 answers have no score" in shown.err


def answers(number: int, request: dict):
    if request.get("logprobs"):
        return 200, fake_judge.answer(0.8), {}
    assert request["max_tokens"] == 40
    return 200, {"choices": [{"message": {"role": "assistant", "content": "Yes. Both are boats."}}]}, {}


def test_over_a_server(paths, capsys, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with fake_judge.FakeJudge(answers) as server:
        arguments = ["score", *paths[:2], "--server", server.url, "--api_key_env", "JUDGE_KEY"]
        assert main([*arguments, "--reasons", "--reason_tokens", "40"]) == 0
        assert {headers.get("authorization") for headers in server.headers} == {"Bearer secret"}
    text = capsys.readouterr().out
    assert "0.8000" in text and "    Yes. Both are boats." in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--server", "http://127.0.0.1:9"], "http://127.0.0.1:9"),
        (["--server", "nowhere"], "--server"),
        (["--server", "http://127.0.0.1:9", "--adapter", "a"], "--adapter"),
        (["--server", "http://127.0.0.1:9", "--api_key_env", "NO_KEY"], "NO_KEY"),
        ([], "--model"),
        (["--instruction", " ", "--server", "http://127.0.0.1:9"], "--instruction"),
    ],
)
def test_problems_are_one_line(paths, arguments, named, capsys):
    assert main(["score", *paths[:2], *arguments]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and named in error
