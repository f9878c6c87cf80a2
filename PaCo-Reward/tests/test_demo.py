"""paco-reward demo over HTTP, and the same sheet as a file."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from PIL import Image

from paco_judge.scorer import JudgeScorer
from paco_judge.verdict import Verdict
from paco_reward import sheet
from paco_reward.answers import Answers, questions_about
from paco_reward.cli import main
from paco_reward.demo import asked_about

PATIENCE_S = 180  # importing torch and gradio on a loaded machine


def panel(color: str) -> Image.Image:
    return Image.new("RGB", (64, 64), color)


@pytest.fixture
def grid(tmp_path, tiny) -> Path:
    """A 2x2 grid of pictures."""
    image = Image.new("RGB", (112, 112))
    for number in range(4):
        image.paste(tiny.picture(number).resize((56, 56)), (number % 2 * 56, number // 2 * 56))
    image.save(tmp_path / "grid.png")
    return tmp_path / "grid.png"


@pytest.fixture(scope="module")
def page(answering_judge):
    """The command as a user starts it; its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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


def expected_scores(judge: Path, grid: Path) -> list[float]:
    scorer = JudgeScorer.from_pretrained(judge)
    answers = asked_about("judge", [(str(grid), None)], 2, 2, "a paper boat", "")
    return [verdict.p_yes for verdict in scorer.score(answers.pairs, top=20)]


@pytest.mark.slow
def test_the_page_over_http(page, grid, answering_judge):
    from gradio_client import Client, handle_file

    client = Client(page, verbose=False)
    picture = [{"image": handle_file(str(grid)), "caption": None}]
    shown = client.predict(picture, 2, 2, "a paper boat", "", True, api_name="/ask")
    cells = [float(text) for text in re.findall(r'<td class="score"[^>]*>([\d.]+)</td>', shown)]
    assert cells == pytest.approx(expected_scores(answering_judge, grid), abs=1e-3)
    assert shown.count("<dt>") == 6 and "grid.png 1 – grid.png 2" in shown
    loaded = re.findall(r'<(?:link rel="stylesheet"|script)[^>]*?(?:src|href)="(https?://[^"]+)"', httpx.get(page, timeout=PATIENCE_S).text)
    assert not [url for url in loaded if not url.startswith(page) and "iframe-resizer" not in url], "nothing leaves the machine"


def answers(questions: dict[str, str], verdicts: list[Verdict], count: int, reasons=()) -> Answers:
    images = [panel(color) for color in ("red", "green", "blue")[:count]]
    return Answers("<b>judge</b>", images, [f"<{n}>&.png" for n in range(count)], questions, verdicts, reasons)


def test_the_sheet_escapes_what_it_shows():
    shown = sheet.page(
        answers(questions_about("<script>"), [Verdict(0.25), Verdict(None, "<i>no</i>"), Verdict(1.0)], 3, ["<a>"] * 3)
    )
    for text in ("<script>", "<b>judge", "<0>&.png", "<i>no", "<a>"):
        assert text not in shown
    assert shown.count("&lt;0&gt;&amp;.png") == 3  # a row, and its two reasons
    assert "0.250" in shown and "1.000" in shown and "No mean: 1 of 3 pairs have no score" in shown


def test_the_sheet_of_edits_has_a_row_each():
    verdicts = [Verdict(0.64), Verdict(0.25), Verdict(0.5), Verdict(None, "gone")]
    shown = sheet.fragment(answers(questions_about(instruction="make it blue"), verdicts, 3))
    assert "0.400" in shown  # sqrt(0.64 * 0.25)
    assert shown.count('class="missing"') == 2  # the answer and the overall score that needs it
    assert "prompt following" in shown and "make it blue" in shown


def test_score_writes_the_sheet(tmp_path, tiny, answering_judge, capsys):
    paths = [str(tmp_path / f"{n}.png") for n in range(2)]
    for number, path in enumerate(paths):
        tiny.picture(number).save(path)
    file = tmp_path / "scores.html"
    assert main(["score", *paths, "--model", str(answering_judge), "--html", str(file)]) == 0
    printed = capsys.readouterr().out.split()[-1]
    assert f"{float(printed):.3f} <small>mean" in file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("count", "rows", "columns", "theme", "instruction", "named"),
    [
        (1, 1, 1, "", "", "not 1"),
        (0, 1, 1, "", "", "not 0"),
        (1, 5, 5, "", "", "not 25"),
        (2, 1, 1, "a boat", "make it blue", "not both"),
        (1, 100, 1, "", "", "cannot be cut"),
    ],
)
def test_what_cannot_be_asked_is_named(tmp_path, count, rows, columns, theme, instruction, named):
    panel("red").save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=named):
        asked_about("judge", [(str(tmp_path / "a.png"), None)] * count, rows, columns, theme, instruction)


def test_others_need_a_password(monkeypatch, capsys):
    monkeypatch.delenv("PACO_DEMO_PASSWORD", raising=False)
    assert main(["demo", "--model", "x/y", "--host", "0.0.0.0"]) == 1
    assert "PACO_DEMO_PASSWORD" in capsys.readouterr().err
