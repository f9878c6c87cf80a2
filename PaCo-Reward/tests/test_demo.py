"""paco-reward demo over HTTP, and the same sheet as a file."""

import re
import subprocess
import sys

import httpx
import pytest
from fakes import free_port
from PIL import Image

from paco_judge.grid import index_pairs, split_image
from paco_judge.images import load_image
from paco_judge.questions import Pair, theme_question
from paco_judge.scorer import JudgeScorer
from paco_judge.verdict import Answer, Verdict
from paco_reward.asking import ask, questions_about, sheet

PATIENCE_S = 180  # importing torch and gradio on a loaded machine


@pytest.fixture
def page(answering_judge):
    """The command as a user starts it; its URL."""
    port = str(free_port())
    command = [
        sys.executable,
        "-m",
        "paco_reward.cli",
        "demo",
        "--model",
        str(answering_judge),
        "--port",
        port,
    ]
    demo = subprocess.Popen(
        [*command, "--reason_tokens", "4"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        lines = []
        while not (lines and lines[-1].startswith("The judge's page:")):
            lines.append(demo.stdout.readline())
            assert lines[-1], "".join(lines)
        yield f"http://127.0.0.1:{port}"
    finally:
        demo.terminate()
        demo.communicate(timeout=PATIENCE_S)


@pytest.mark.slow
def test_the_page_over_http(page, world, answering_judge):
    from gradio_client import Client, exceptions, handle_file

    client = Client(page, verbose=False)
    grid = world / "grids" / "p0_0.png"
    picture = [{"image": handle_file(str(grid)), "caption": None}]
    shown = client.predict(picture, 2, 2, "a paper boat", "", True, api_name="/ask")
    cells = [float(text) for text in re.findall(r'<td class="score"[^>]*>([\d.]+)</td>', shown)]
    # Cut and asked here, without the page's own functions.
    panels = split_image(load_image(grid), 2, 2)
    question = theme_question("a paper boat")
    scorer = JudgeScorer.from_pretrained(answering_judge)
    expected = scorer.score(
        [Pair(panels[i], panels[j], question) for i, j in index_pairs(4)], top=20
    )
    assert cells == pytest.approx([verdict.p_yes for verdict in expected], abs=1e-3)
    with pytest.raises(exceptions.AppError, match="give 2 to 16 images, .* not 18"):
        client.predict(picture, 6, 3, "", "", False, api_name="/ask")
    assert shown.count("<dt>") == 6 and "p0_0.png 1 – p0_0.png 2" in shown
    loaded = r'<(?:link rel="stylesheet"|script)[^>]*?(?:src|href)="(https?://[^"]+)"'
    urls = [
        url
        for url in re.findall(loaded, httpx.get(page, timeout=PATIENCE_S).text)
        if not url.startswith(page)
    ]
    assert not [url for url in urls if "iframe-resizer" not in url], "nothing leaves the machine"


class SaysOnly:
    """A judge of fixed answers."""

    def __init__(self, *verdicts: Verdict):
        self.name = "<b>judge</b>"
        self._verdicts = list(verdicts)

    def verdicts(self, pairs):
        assert len(pairs) == len(self._verdicts)
        return self._verdicts

    def answers(self, pairs, max_tokens):
        return [Answer("<a>")] * len(pairs)


IMAGES = [Image.new("RGB", (64, 64), color) for color in ("red", "green", "blue")]


def test_the_sheet_escapes_what_it_shows():
    judge = SaysOnly(Verdict(0.25), Verdict(None, "<i>no</i>"), Verdict(1.0))
    names = [f"<{number}>&.png" for number in range(3)]
    report = ask(judge, IMAGES, names, questions_about("<script>"), reason_tokens=8)
    shown = sheet(report, whole_page=True)
    for text in ("<script>", "<b>judge", "<0>&.png", "<i>no", "<a>"):
        assert text not in shown
    assert shown.count("&lt;0&gt;&amp;.png") == 3  # a row, and its two reasons
    assert "0.250" in shown and "1.000" in shown and "No mean: 1 of 3 pairs have no score" in shown


def test_a_score_that_follows_from_answers_is_no_answer():
    judge = SaysOnly(Verdict(0.25), Verdict(1.0), Verdict(0.81), Verdict(None, "gone"))
    report = ask(judge, IMAGES, list("abc"), questions_about(instruction="make it blue"))
    overall = [row.verdict.p_yes for row in report.rows if row.dimension == "overall"]
    assert overall == [0.5, None]
    assert report.missing == 1 and len(report.answers) == 4
    shown = sheet(report)
    assert "0.500" in shown and "an answer is missing" in shown and "gone" in shown


def test_a_single_question_about_edits_is_shown_under_its_own_name():
    questions = questions_about(instruction="blue", templates=["editing_instruction"])
    report = ask(SaysOnly(Verdict(0.2), Verdict(0.3)), IMAGES, list("abc"), questions)
    assert [row.dimension for row in report.rows] == ["prompt_following"] * 2
    assert "prompt following" in sheet(report) and "consistency" not in sheet(report)
