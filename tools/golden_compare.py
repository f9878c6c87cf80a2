"""Compare two folders of outputs: tensors, JSON values and pixels exactly, with the size of every difference."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from safetensors import safe_open

# Files that hold prose, logs, times or pickled settings: only their presence is compared.
OPAQUE = (".md", ".html", ".log", ".err", ".lock", ".svg", ".bin")
# Keys of JSON whose values depend on the clock, the machine or the version of the code; "python" is the state of the
# module ``random``, which nothing computes with but the pauses between a client's attempts.
VOLATILE = re.compile(
    r"(^|[./])(time|train_time|date|created|seconds|elapsed|elapsed_time|remaining_time|train_runtime|commit|version|versions|hostname|machine|pid|python)$"
    r"|(^|\.)(time|memory|speed_of)/|_(s|seconds|per_second|mib|gib|bytes_free)$",
    re.IGNORECASE,
)
MOST_LINES = 8  # differences shown of one file


def compare_folders(a: Path, b: Path) -> list[str]:
    """One line for each difference between the files of two folders; none if they are equal."""
    files_a, files_b = _files(a), _files(b)
    lines = [f"{name}: only in {'A' if name in files_a else 'B'}" for name in sorted(files_a ^ files_b)]
    for name in sorted(files_a & files_b):
        found = list(compare_files(a / name, b / name))
        lines += [f"{name}: {line}" for line in found[:MOST_LINES]]
        if len(found) > MOST_LINES:
            lines.append(f"{name}: and {len(found) - MOST_LINES} more")
    return lines


def compare_files(a: Path, b: Path) -> Iterator[str]:
    """The differences of two files of the same name, by what their suffix says they hold."""
    if a.suffix in OPAQUE or a.read_bytes() == b.read_bytes():
        return
    if a.suffix == ".safetensors":
        yield from _compare_tensors(a, b)
    elif a.suffix in (".json", ".jsonl", ".yaml", ".out", ".txt"):
        yield from _compare_values(_read(a), _read(b))
    elif a.suffix in (".png", ".jpg", ".jpeg", ".webp"):
        yield _image_difference(a, b)
    else:
        yield f"{a.stat().st_size} and {b.stat().st_size} bytes differ"


def _files(folder: Path) -> set[str]:
    """Names of the files; caches of libraries and events of TensorBoard hold times."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(n) for n in found if "cache.log" not in n.parts and not n.name.startswith("events.out")}


def _read(path: Path) -> dict[str, Any]:
    """{path of keys: leaf} of a structured file; the numbers of a text, whose words may change."""
    text = path.read_text(errors="replace")
    if path.suffix in (".out", ".txt"):
        found = re.findall(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w])", text)
        return {f"number {i}": float(word) for i, word in enumerate(found)}
    if path.parent.name == "scores" and path.suffix == ".jsonl":
        return _flat(_journal(text))
    if path.suffix == ".jsonl":
        lines = [line for line in text.splitlines() if line.strip()]
        # Answers of a server are written down in the order in which they arrive.
        return _flat([json.loads(line) for line in (sorted(lines) if path.parent.name == "work" else lines)])
    return _flat(yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text))


def _journal(text: str) -> dict[str, list]:
    """{epoch and image: its scores}: lines are written in the order in which rewards finish.

    The keys begin with a digest of the reward's arguments, among them the judge's address.
    """
    scores: dict[str, list] = {}
    for row in map(json.loads, text.splitlines()):
        for key, score in row["scores"].items():
            scores.setdefault(f"{row['epoch']} {key.split('-')[-1]}", []).append(score)
    return {key: sorted(values, key=repr) for key, values in scores.items()}


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    """{path of keys: leaf}, without volatile keys."""
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    else:
        return {key: value}
    flat = {}
    for name, child in children:
        if not VOLATILE.search(str(name)):
            flat |= _flat(child, f"{key}.{name}".lstrip("."))
    return flat


def _compare_values(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    for key in [*a, *(key for key in b if key not in a)]:
        if key not in b or key not in a:
            yield f"{key}: only in {'A' if key in a else 'B'}"
            continue
        x, y = a[key], b[key]
        if repr(x) == repr(y):  # of the same type and value; NaN equals NaN
            continue
        size = ""
        if isinstance(x, (int, float)) and isinstance(y, (int, float)) and not isinstance(x, bool):
            size = f" (difference {abs(x - y):.3g}, relative {abs(x - y) / max(abs(x), abs(y), 1e-300):.3g})"
        yield f"{key}: {repr(x)[:80]} and {repr(y)[:80]}{size}"


def _compare_tensors(a: Path, b: Path) -> Iterator[str]:
    with safe_open(a, "pt") as one, safe_open(b, "pt") as two:
        keys_a, keys_b = set(one.keys()), set(two.keys())
        for key in sorted(keys_a ^ keys_b):
            yield f"tensor {key}: only in {'A' if key in keys_a else 'B'}"
        for key in sorted(keys_a & keys_b):
            x, y = one.get_tensor(key), two.get_tensor(key)
            if (x.shape, x.dtype) != (y.shape, y.dtype):
                yield f"tensor {key}: {tuple(x.shape)} {x.dtype} and {tuple(y.shape)} {y.dtype}"
            elif not torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)):
                gap, largest = (x.double() - y.double()).abs().max().item(), x.double().abs().max().item()
                relative = gap / max(largest, 1e-300)
                yield f"tensor {key}: largest difference {gap:.3g}, relative to its largest value {relative:.3g}"
        metadata = [{f"metadata {k}": v for k, v in (f.metadata() or {}).items()} for f in (one, two)]
        yield from _compare_values(*metadata)


def _image_difference(a: Path, b: Path) -> str:
    with Image.open(a) as one, Image.open(b) as two:
        x, y = np.asarray(one.convert("RGB"), dtype=int), np.asarray(two.convert("RGB"), dtype=int)
    if x.shape != y.shape:
        return f"image of {x.shape[1]}x{x.shape[0]} and of {y.shape[1]}x{y.shape[0]} pixels"
    gap = np.abs(x - y)
    if not gap.any():
        return "equal pixels, but other bytes"
    return f"{(gap.max(-1) > 0).mean():.1%} of the pixels differ, by {gap.max()} of 255 at most"
