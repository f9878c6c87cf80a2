"""The quickstart's output: time left, a live line on a terminal, few lines in a file."""

import io

import pytest

from paco_toy.console import Console, TimeLeft, clock


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (187, "3:07"), (3727, "1:02:07"), (-3, "0:00")])
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_time_left_counts_later_stages_at_this_machines_pace():
    left = TimeLeft({"a": 60, "b": 100, "c": 50})
    assert left.left("a", 4, None) == pytest.approx(56 + 150)
    left.spent["a"] = 180  # three times as slow as expected, but little evidence: twice
    assert left.pace() == 2
    assert left.left("b", 50, None) == pytest.approx(150 + 100)


def test_the_stages_own_rate_counts_more_the_further_it_is():
    left = TimeLeft({"a": 100})
    # half done after 100 s: the rate says 100 s, the expectation says 0
    assert left.left("a", 100, 0.5) == pytest.approx(50)
    assert left.left("a", 190, 0.95) == pytest.approx(0.95 * 10)
    assert left.left("a", 500, None) == 0


def test_a_file_gets_few_lines_and_a_terminal_a_live_one(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("paco_toy.console.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    console = Console(TimeLeft({"a": 60, "b": 1}), stream)
    console.stage("a", "First")
    for _ in range(500):
        now[0] += 0.1
        console.progress("doing", now[0] / 60, "step 1/9")
    lines = stream.getvalue().splitlines()
    assert lines[1] == "[1/2] First" and len(lines) == 4 and "\r" not in stream.getvalue()
    assert "left in all" in lines[2] and "step 1/9" in lines[2]

    stream = io.StringIO()
    stream.isatty = lambda: True
    console = Console(TimeLeft({"a": 60, "b": 1}), stream)
    console.stage("a", "First")
    now[0] += 1
    console.progress("doing", 0.5, "x" * 500)
    console.line("done")
    text = stream.getvalue()
    assert "\r\x1b[2K" in text and "50%" in text and text.endswith("\r\x1b[2K      done\n")
    assert max(len(part) for part in text.replace("\x1b[2K", "").split("\r")) < 200
