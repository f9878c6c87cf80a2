"""From the public sets' own columns to the prompt sets of this project; no network.

Each function reads a folder ``source`` that holds a set as it is published and writes our files to a folder ``out``.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from PIL import Image, UnidentifiedImageError

_QUOTED = re.compile(r'"[^"]*\w[^"]*"|“[^”]*\w[^”]*”')


class ConversionError(ValueError):
    """A set that is not in the form we know; the message names file, row and column."""


def t2is(source: Path, out: Path, test_share: float) -> None:
    """T2IS prompts: JSON lines with ``prompt``, ``theme``, ``criteria`` … → ``geneval``.

    A set that comes as one file is divided by a hash of each item's theme, so that train and test share none.
    """
    known = {split: sorted(source.rglob(f"{split}*.jsonl")) for split in ("train", "test")}
    splits: dict[str, list[dict]] = {"train": [], "test": []}
    if all(known.values()):
        for split, files in known.items():
            splits[split] = [row for file in files for _, row in json_rows(file)]
    else:
        for file in _files(source, "*.jsonl"):
            for where, row in json_rows(file):
                key = row.get("theme") or _column(row, "prompt", where)
                splits["test" if share_of(str(key)) < test_share else "train"].append(row)
    for split, rows in splits.items():
        _write_json_lines(out / f"{split}_metadata.jsonl", rows)


def gedit(source: Path, out: Path, language: str) -> None:
    """GEdit-Bench (``instruction``, ``input_image_raw``, ``task_type``, ``instruction_language``) → ``geneval_image``.

    It is a benchmark, so all of it is the test split.
    """
    rows = []
    (out / "images").mkdir()
    for where, row in parquet_rows(_files(source, "*.parquet")):
        if _column(row, "instruction_language", where) != language:
            continue
        name = f"images/{_safe(str(_column(row, 'key', where)))}.png"
        image = row.get("input_image_raw") or _column(row, "input_image", where)
        (out / name).write_bytes(png(image["bytes"] if isinstance(image, Mapping) else image, where))
        rows.append(
            {
                "prompt": _column(row, "instruction", where),
                "image": name,
                "idx": str(row["key"]),
                "category": _column(row, "task_type", where),
            }
        )
    _write_json_lines(out / "test_metadata.jsonl", rows)


def sharegpt_4o_image(source: Path, out: Path, test_share: float, limit: int | None = None) -> None:
    """ShareGPT-4o-Image, editing half (``input_prompt``, ``input_image``) → ``arrow_editing``, ``limit`` items at most.

    Rows with several input images are left out. Images lie beside the JSON file or in its tar archives.
    """
    file = _files(source, "text_and_image_to_image*.json")[0]
    pictures, written = _Pictures(source), 0
    with _EditingTable(out / "train.parquet") as train, _EditingTable(out / "test.parquet") as test:
        for number, row in enumerate(json.loads(file.read_text(encoding="utf-8"))):
            if limit is not None and written >= limit:
                break
            where = f"{file}: row {number}"
            names = _column(row, "input_image", where)
            names = [names] if isinstance(names, str) else list(names)
            if len(names) != 1:
                continue
            prompt = _column(row, "input_prompt", where)
            table = test if share_of(names[0]) < test_share else train  # by image: no picture is in both
            table.add(prompt, pictures.read(names[0], where))
            written += 1


def pickscore(source: Path, out: Path, limit: int | None = None) -> None:
    """Pick-a-Pic (``caption``; files named by split) → ``general_ocr`` lists, each caption once and in one split."""
    captions: dict[str, list[str]] = {"test": [], "train": []}
    seen: set[str] = set()
    files = _files(source, "*.parquet")
    for split, named in (("test", "test"), ("train", "train")):
        for where, row in parquet_rows([file for file in files if file.name.startswith(named)], ["caption"]):
            caption = " ".join(str(_column(row, "caption", where)).split())
            if caption and caption not in seen and (limit is None or len(captions[split]) < limit):
                seen.add(caption)
                captions[split].append(caption)
    for split, lines in captions.items():
        _write_lines(out / f"{split}.txt", lines)


def ocr(source: Path, out: Path) -> None:
    """Flow-GRPO's OCR prompts (``{train,test}.txt``) → ``general_ocr``, only lines with a text in double quotes."""
    for split in ("train", "test"):
        file = _files(source, f"{split}.txt")[0]
        lines = (" ".join(line.split()) for line in file.read_text(encoding="utf-8").splitlines())
        _write_lines(out / f"{split}.txt", dict.fromkeys(line for line in lines if _QUOTED.search(line)))


def share_of(text: str) -> float:
    """A number in [0, 1) that depends on ``text`` alone, the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def json_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) of every line of a JSON lines file."""
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConversionError(f"{file}:{number}: not JSON: {error}") from error
        yield f"{file}:{number}", row


def parquet_rows(files: Iterable[Path], columns: list[str] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of every row, a piece of a file at a time."""
    import pyarrow.parquet

    for file in files:
        table = pyarrow.parquet.ParquetFile(file)
        absent = [column for column in columns or [] if column not in table.schema_arrow.names]
        if absent:
            raise ConversionError(f"{file}: column {absent[0]!r} is missing; it has {table.schema_arrow.names}")
        number = 0
        for batch in table.iter_batches(batch_size=64, columns=columns):
            for row in batch.to_pylist():
                yield f"{file}: row {number}", row
                number += 1


def png(data: bytes, where: str) -> bytes:
    """An encoded image as an RGB PNG."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            buffer = io.BytesIO()
            image.convert("RGB").save(buffer, format="PNG")
    except (UnidentifiedImageError, OSError, TypeError) as error:
        raise ConversionError(f"{where}: the image cannot be read: {error}") from error
    return buffer.getvalue()


def _write_json_lines(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _write_lines(file: Path, lines: Iterable[str]) -> None:
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


class _Pictures:
    """Images of a set by name: files, or members of the tar archives beside them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._members: dict[str, tuple[Path, tarfile.TarInfo]] = {}
        for archive in sorted(folder.rglob("*.tar")):
            with tarfile.open(archive) as tar:
                self._members |= {
                    member.name.removeprefix("./"): (archive, member) for member in tar if member.isfile()
                }

    def read(self, name: str, where: str) -> bytes:
        for candidate in (name, f"text_and_image_to_image/{name}", Path(name).name):
            file = self._folder / candidate
            if file.is_file():
                return file.read_bytes()
            if candidate in self._members:
                archive, member = self._members[candidate]
                with tarfile.open(archive) as tar:
                    return tar.extractfile(member).read()
        raise ConversionError(f"{where}: image {name!r} is neither a file of {self._folder} nor in its archives")


class _EditingTable:
    """A Parquet file with ``prompt`` and ``image``, written in pieces: a large set is never in memory."""

    _PIECE = 64

    def __init__(self, file: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet

        self._pa = pa
        image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        self._schema = pa.schema({"prompt": pa.string(), "image": image})
        self._writer = pyarrow.parquet.ParquetWriter(file, self._schema)
        self._rows: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        self._writer.close()

    def add(self, prompt: str, image: bytes) -> None:
        """One more row; ``image`` is encoded."""
        self._rows.append({"prompt": prompt, "image": {"bytes": image, "path": None}})
        if len(self._rows) == self._PIECE:
            self._flush()

    def _flush(self) -> None:
        self._writer.write_table(self._pa.Table.from_pylist(self._rows, schema=self._schema))
        self._rows.clear()


def _files(folder: Path, pattern: str) -> list[Path]:
    files = sorted(folder.rglob(pattern))
    if not files:
        endings = Counter(file.suffix for file in folder.rglob("*") if file.is_file())
        raise ConversionError(f"{folder} holds no {pattern}; it holds {dict(endings) or 'nothing'}")
    return files


def _column(row: Mapping[str, Any], name: str, where: str) -> Any:
    value = row.get(name) if isinstance(row, Mapping) else None
    if value is None or value == "":
        has = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        raise ConversionError(f"{where}: column {name!r} is missing or empty; the row has {has}")
    return value


def _safe(name: str) -> str:
    return re.sub(r"[^\w-]", "_", name)
