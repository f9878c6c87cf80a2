"""paco-reward demo over HTTP, and the same sheet as a file."""

import re
import subprocess
import sys

import httpx
import pytest
from fakes import free_port
from PIL import Image

from paco_judge.client import Pair
from paco_judge.grid import pairs
from paco_judge.scorer import JudgeScorer
from paco_judge.verdict import Verdict
from paco_reward.demo import asked_about
from paco_reward.score import Judge, ask, questions_about, sheet

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

    client, grid = Client(page, verbose=False), world / "grids" / "p0_0.png"
    picture = [{"image": handle_file(str(grid)), "caption": None}]
    shown = client.predict(picture, 2, 2, "a paper boat", "", True, api_name="/ask")
    cells = [float(text) for text in re.findall(r'<td class="score"[^>]*>([\d.]+)</td>', shown)]
    images, _, questions = asked_about([(str(grid), None)], 2, 2, "a paper boat", "")
    asked = [Pair(images[i], images[j], questions[""]) for i, j in pairs(4)]
    verdicts = JudgeScorer.from_pretrained(answering_judge).score(asked, top=20)
    assert cells == pytest.approx([verdict.p_yes for verdict in verdicts], abs=1e-3)
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


def test_the_sheet_escapes_what_it_shows():
    images = [Image.new("RGB", (64, 64), color) for color in ("red", "green", "blue")]
    verdicts, names = (
        [Verdict(0.25), Verdict(None, "<i>no</i>"), Verdict(1.0)],
        [f"<{n}>&.png" for n in range(3)],
    )
    judge = Judge("<b>judge</b>", lambda asked: verdicts, lambda asked: ["<a>"] * 3)
    shown = sheet(
        ask(judge, images, names, questions_about("<script>"), reasons=True), whole_page=True
    )
    for text in ("<script>", "<b>judge", "<0>&.png", "<i>no", "<a>"):
        assert text not in shown
    assert shown.count("&lt;0&gt;&amp;.png") == 3  # a row, and its two reasons
    assert "0.250" in shown and "1.000" in shown and "No mean: 1 of 3 pairs have no score" in shown
