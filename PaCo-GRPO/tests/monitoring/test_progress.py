"""Long loops say how far they are: lines in a log, one bar in a terminal, of one process."""

import logging
import sys
from itertools import count
from unittest.mock import patch

from paco_grpo.monitoring import progress as module
from paco_grpo.monitoring.progress import progress


def test_a_line_from_time_to_time(monkeypatch, caplog):
    """Every 25 seconds, with an image each 10 seconds: the third, not the first two."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "_LINE_EVERY_S", 25.0)
    times = count(0, 10.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: next(times))
    with progress("drawing", 24, processes=3) as finish:
        for _ in range(4):
            finish(2)
    with progress("drawing", 24, is_main=False) as finish:
        finish(3)
    assert caplog.messages == [
        "drawing: 6 of 24 images on each of 3 processes, 1.5 min left",
    ]


def test_a_bar_in_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(module, "_DELAY_S", 0.0)
    with patch.object(sys.stderr, "isatty", lambda: True), progress("drawing", 8) as finish:
        finish(3)
    assert "drawing" in capsys.readouterr().err
