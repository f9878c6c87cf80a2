"""Answers of a server, written down one by one, so that a killed run asks for none of them again."""

import json
from pathlib import Path
from typing import Any

from paco_reward.errors import PacoRewardError


class Journal:
    """A file of ``{"key": …, "value": …}`` lines. A line that a kill cut off is removed when the file is opened.

    Raises:
        PacoRewardError: a whole line is not what this class writes; names the line.
    """

    def __init__(self, file: Path) -> None:
        self.values: dict[str, Any] = {}
        file.parent.mkdir(parents=True, exist_ok=True)
        raw = file.read_bytes() if file.exists() else b""
        whole = raw[: raw.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                row = json.loads(line)
                self.values.setdefault(row["key"], row["value"])
            except (ValueError, KeyError, TypeError) as error:
                raise PacoRewardError(f"{file} line {number} is damaged ({error}); remove this line") from error
        self._file = file
        if len(whole) != len(raw):
            file.write_bytes(whole)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def add(self, key: str, value: Any) -> None:
        """Keep an answer; it is in the file when this returns."""
        if key in self.values:
            return
        self.values[key] = value
        with self._file.open("ab") as file:
            file.write((json.dumps({"key": key, "value": value}, ensure_ascii=False) + "\n").encode("utf-8"))


def write_atomically(file: Path, content: bytes) -> None:
    """Write a file so that it is either whole or not there, however the process ends."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    partial.write_bytes(content)
    partial.replace(file)


def write_json(file: Path, value: Any) -> None:
    """``write_atomically`` of indented JSON."""
    write_atomically(file, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8"))
