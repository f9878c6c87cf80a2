"""paco-reward demo over HTTP, and the same sheet as a file."""

import re
import subprocess
import sys

import httpx
import pytest
from fakes import free_port
from PIL import Image

from paco_judge.scorer import JudgeScorer
from paco_judge.verdict import Verdict
from paco_reward import sheet
from paco_reward.answers import Answers, questions_about
from paco_reward.demo import asked_about

PATIENCE_S = 180  # importing torch and gradio on a loaded machine


@pytest.fixture
def page(answering_judge):
    """The command as a user starts it; its URL."""
    port = free_port()
    command = [sys.executable, "-m", "paco_reward.cli", "demo", "--model", str(answering_judge), "--port", str(port)]
    demo = subprocess.Popen(
        [*command, "--reason_tokens", "4"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        lines = []
        while not (lines and lines[-1].startswith("The judge's page:")):
            lines.append(demo.stdout.readline())
            assert lines[-1], "".join(lines)
        yield re.search(r"http://\S+?(?=[\s.]*(?: |$))", lines[-1])[0].rstrip(".")
    finally:
        demo.terminate()
        demo.communicate(timeout=PATIENCE_S)


@pytest.mark.slow
def test_the_page_over_http(page, world, answering_judge):
    from gradio_client import Client, handle_file

    client, grid = Client(page, verbose=False), world / "grids" / "p0_0.png"
    picture = [{"image": handle_file(str(grid)), "caption": None}]
    shown = client.predict(picture, 2, 2, "a paper boat", "", True, api_name="/ask")
    cells = [float(text) for text in re.findall(r'<td class="score"[^>]*>([\d.]+)</td>', shown)]
    pairs = asked_about("judge", [(str(grid), None)], 2, 2, "a paper boat", "").pairs
    verdicts = JudgeScorer.from_pretrained(answering_judge).score(pairs, top=20)
    assert cells == pytest.approx([verdict.p_yes for verdict in verdicts], abs=1e-3)
    assert shown.count("<dt>") == 6 and "p0_0.png 1 – p0_0.png 2" in shown
    loaded = re.findall(r'<(?:link rel="stylesheet"|script)[^>]*?(?:src|href)="(https?://[^"]+)"', httpx.get(page, timeout=PATIENCE_S).text)
    assert not [url for url in loaded if not url.startswith(page) and "iframe-resizer" not in url], "nothing leaves the machine"


def test_the_sheet_escapes_what_it_shows():
    images = [Image.new("RGB", (64, 64), color) for color in ("red", "green", "blue")]
    verdicts, names = [Verdict(0.25), Verdict(None, "<i>no</i>"), Verdict(1.0)], [f"<{n}>&.png" for n in range(3)]
    shown = sheet.page(Answers("<b>judge</b>", images, names, questions_about("<script>"), verdicts, ["<a>"] * 3))
    for text in ("<script>", "<b>judge", "<0>&.png", "<i>no", "<a>"):
        assert text not in shown
    assert shown.count("&lt;0&gt;&amp;.png") == 3  # a row, and its two reasons
    assert "0.250" in shown and "1.000" in shown and "No mean: 1 of 3 pairs have no score" in shown


def test_what_cannot_be_asked_is_named(world):
    for count, rows, instruction, named in ((1, 1, "", "not 1"), (1, 24, "", "not 24"), (2, 1, "make it blue", "not both")):
        with pytest.raises(ValueError, match=named):
            asked_about("judge", [(str(world / "grids" / "p0_0.png"), None)] * count, rows, 1, "a boat", instruction)
