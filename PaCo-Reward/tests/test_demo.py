"""paco-reward demo over HTTP."""

import re
import subprocess
import sys

import pytest
from fakes import free_port
from gradio_client import Client, handle_file

from paco_judge.grid import index_pairs, split_image
from paco_judge.images import load_image
from paco_judge.questions import Pair, theme_question
from paco_judge.scorer import JudgeScorer

PATIENCE_S = 180  # importing torch and gradio on a loaded machine


@pytest.fixture
def page(answering_judge):
    """The command as a user starts it; its URL."""
    port = str(free_port())
    command = [sys.executable, "-m", "paco_reward.cli", "demo", "--reason_tokens", "4"]
    command += ["--model", str(answering_judge), "--port", port]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        while "The judge's page:" not in (line := demo.stdout.readline()):
            assert line
        yield f"http://127.0.0.1:{port}"
    finally:
        demo.terminate()
        demo.communicate(timeout=PATIENCE_S)


@pytest.mark.slow
def test_the_page_over_http(page, world, answering_judge):
    client = Client(page, verbose=False)
    grid = world / "grids" / "p0" / "0.png"
    picture = [{"image": handle_file(str(grid)), "caption": None}]
    shown = client.predict(picture, 1, 3, "a paper boat", "", True, api_name="/ask")
    cells = [float(text) for text in re.findall(r'<td class="score"[^>]*>([\d.]+)</td>', shown)]
    # Cut and asked here, without the page's own functions.
    panels = split_image(load_image(grid), 1, 3)
    question = theme_question("a paper boat")
    pairs = [Pair(panels[i], panels[j], question) for i, j in index_pairs(3)]
    expected = JudgeScorer.from_pretrained(answering_judge).score(pairs)
    assert cells == pytest.approx([verdict.p_yes for verdict in expected], abs=1e-3)
    assert shown.count("<dt>") == 3 and "0.png 1 – 0.png 2" in shown
