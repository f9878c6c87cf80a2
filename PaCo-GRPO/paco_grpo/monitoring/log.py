"""log.txt: what the main process logs, kept in the run's folder."""

import contextlib
import logging
import re
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

from typing_extensions import override

from paco_grpo.monitoring import signs

NAME = "log.txt"
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_ENTRY = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ (?P<level>[A-Z]+) (?P<logger>\S+): (?P<message>.*)")


class _WithoutKeys(logging.Formatter):
    """Leaves out the key of a page's address: others may read the file."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        return re.sub(r"\?key=\S+", "", super().format(record))


@contextlib.contextmanager
def kept_log(folder: Path) -> Generator[None]:
    """Append to ``folder``/log.txt what is logged inside the block."""
    handler = logging.FileHandler(folder / NAME, encoding="utf-8", delay=True)
    handler.setFormatter(_WithoutKeys(_FORMAT))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


class Warned(NamedTuple):
    """A warning of log.txt: its first line, and how often it stands there."""

    message: str
    count: int


def logged_warnings(folder: Path) -> list[Warned]:
    """Warnings and errors in ``folder``/log.txt, each once, in order; without signs of collapse."""
    file = folder / NAME
    counts: dict[str, int] = {}
    if file.is_file():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            entry = _ENTRY.match(line)
            if entry is None or entry["level"] in ("DEBUG", "INFO"):
                continue
            if entry["logger"] != signs.logger.name:
                counts[entry["message"]] = counts.get(entry["message"], 0) + 1
    return [Warned(message, count) for message, count in counts.items()]
