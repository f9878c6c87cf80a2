"""The class for a few lines of Python: in this process and behind a server."""

import math
import subprocess
import sys
import time

import pytest
import tiny_judge
from fakes import fake_judge

from paco_judge import Judge
from paco_judge.images import UnreadableImage
from paco_judge.questions import (
    Pair,
    editing_texts,
    load_editing_questions,
    load_question,
    theme_question,
)
from paco_judge.scorer import JudgeScorer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random judge whose most probable tokens are Yes and No."""
    root = tmp_path_factory.mktemp("judge")
    return tiny_judge.save_answering(tiny_judge.save_judge(root / "random"), root / "answering")


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    for number, path in enumerate(paths):
        tiny_judge.picture(number).save(path)
    return paths


def test_scores_in_this_process_are_the_scorers(folder, files):
    judge, scorer = Judge.from_pretrained(folder), JudgeScorer.from_pretrained(folder)
    first, second, third = (tiny_judge.picture(number) for number in range(3))

    def expected(a, b, question):
        return scorer.score([Pair(a, b, question)])[0].p_yes

    with_theme = expected(first, second, theme_question("boats"))
    without = expected(first, third, load_question("pair").text())
    assert judge.score(files[0], str(files[1]), theme="boats") == pytest.approx(with_theme)
    # One image beside a list counts for all of it. Files of two folders may share a name.
    elsewhere = files[0].with_name("elsewhere") / files[1].name
    elsewhere.parent.mkdir()
    third.save(elsewhere)
    both = judge.score(first, [files[1], elsewhere], theme=["boats", None])
    assert both == pytest.approx([with_theme, without], abs=1e-5)
    edits = []
    made = [(first, second, "make it blue"), (third, first, "turn it")]
    for before, edited, instruction in made:
        texts = editing_texts(load_editing_questions(), instruction).values()
        edits.append(math.sqrt(math.prod(expected(before, edited, text) for text in texts)))
    assert judge.score_edit(*files[:2], "make it blue") == pytest.approx(edits[0], abs=1e-5)
    scores = judge.score_edit([first, files[2]], [files[1], first], ["make it blue", "turn it"])
    assert scores == pytest.approx(edits, abs=1e-5)
    bad, answer = judge.explain(files[0], files[1], ["<|image_pad|>", "boats"], max_tokens=4)
    (reasons,) = scorer.reasons([Pair(first, second, theme_question("boats"))], 4)
    assert bad is None and answer == reasons.text


def respond(number, request):
    asks_about_cats = "cats" in request["messages"][0]["content"][-1]["text"]
    return 200, fake_judge.answer(0.9 if asks_about_cats else 0.4), {}


def test_a_bad_image_costs_its_own_pairs_of_a_list(files, tmp_path):
    cut_off = tmp_path / "half.png"
    cut_off.write_bytes(files[0].read_bytes()[:60])
    with fake_judge.FakeJudge(respond, models=["mine"]) as server:
        judge = Judge(server.url, model="mine")
        themes = ["dogs", "cats", "cats"]
        scores = judge.score([files[0], cut_off, files[1]], files[2], theme=themes)
        assert scores == [pytest.approx(0.4), None, pytest.approx(0.9)]
        with pytest.raises(UnreadableImage, match="half.png"):
            judge.score(files[0], cut_off)


def test_a_long_list_has_no_common_deadline(files, monkeypatch):
    """Of a server that answers a pair in 20 ms, one after the other."""

    def slowly(number, request):
        time.sleep(0.02)
        return fake_judge.by_content(number, request)

    monkeypatch.setattr("paco_judge.judge.PAIRS_AT_ONCE", 5)
    themes = [f"theme {number}" for number in range(33)]
    with fake_judge.FakeJudge(slowly, models=["mine"]) as server:
        judge = Judge(server.url, "mine", max_concurrency=1, deadline_s=0.5)
        scores = judge.score(files[0], files[1], themes)
    with fake_judge.FakeJudge(fake_judge.by_content, models=["mine"]) as server:
        assert scores == Judge(server.url, "mine").score(files[0], files[1], themes)


def test_importing_the_package_loads_neither_torch_nor_the_client():
    code = (
        "import sys, paco_judge, paco_judge.questions; assert 'torch' not in sys.modules; "
        "assert 'aiohttp' not in sys.modules; from paco_judge import Judge; "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
