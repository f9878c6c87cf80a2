"""Compare two folders of outputs: tensors, JSON values and pixels exactly, with the size of every difference."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    files_a, files_b = (dict(_files(folder)) for folder in (a, b))
    lines = [f"{name}: only in A" for name in files_a if name not in files_b]
    lines += [f"{name}: only in B" for name in files_b if name not in files_a]
    for name in sorted(files_a.keys() & files_b.keys()):
        found = list(compare_files(files_a[name], files_b[name]))
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
    elif a.suffix in (".json", ".jsonl", ".yaml"):
        yield from _compare_values(_flat(_read(a)), _flat(_read(b)))
    elif a.suffix in (".png", ".jpg", ".jpeg", ".webp"):
        yield _image_difference(a, b)
    elif a.suffix in (".out", ".txt"):
        yield from _compare_values(_numbers(a), _numbers(b))
    else:
        yield f"{a.stat().st_size} and {b.stat().st_size} bytes differ"


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        # Caches of libraries and events of TensorBoard hold times.
        if path.is_file() and "cache.log" not in name.parts and not path.name.startswith("events.out"):
            yield str(name), path


def _read(path: Path) -> Any:
    text = path.read_text()
    if path.parent.name == "scores":
        return _journal(text)
    if path.suffix == ".jsonl":
        lines = [line for line in text.splitlines() if line.strip()]
        # Answers of a server are written down in the order in which they arrive.
        return [json.loads(line) for line in (sorted(lines) if path.parent.name == "work" else lines)]
    if path.suffix == ".yaml":
        import yaml

        return yaml.safe_load(text)
    return json.loads(text)


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


def _numbers(path: Path) -> dict[str, Any]:
    """The numbers of a text; its words may change."""
    found = re.findall(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w])", path.read_text(errors="replace"))
    return {f"number {i}": float(text) for i, text in enumerate(found)}


def _compare_values(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    for key in [*a, *(key for key in b if key not in a)]:
        if key not in b or key not in a:
            yield f"{key}: only in {'A' if key in a else 'B'}"
        elif not _same(a[key], b[key]):
            yield f"{key}: {_show(a[key])} and {_show(b[key])}{_size(a[key], b[key])}"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return type(a) is type(b) and a == b


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _size(a: Any, b: Any) -> str:
    if isinstance(a, (int, float)) and isinstance(b, (int, float)) and not isinstance(a, bool):
        return f" (difference {abs(a - b):.3g}, relative {abs(a - b) / max(abs(a), abs(b), 1e-300):.3g})"
    return ""


def _compare_tensors(a: Path, b: Path) -> Iterator[str]:
    import torch
    from safetensors.torch import load_file

    one, two = load_file(a), load_file(b)
    for key in sorted(one.keys() ^ two.keys()):
        yield f"tensor {key}: only in {'A' if key in one else 'B'}"
    same = True
    for key in sorted(one.keys() & two.keys()):
        x, y = one[key], two[key]
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            yield f"tensor {key}: {tuple(x.shape)} {x.dtype} and {tuple(y.shape)} {y.dtype}"
        elif not torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)):
            same = False
            gap, largest = (x.double() - y.double()).abs().max().item(), x.double().abs().max().item()
            yield f"tensor {key}: largest difference {gap:.3g}, relative to its largest value {gap / max(largest, 1e-300):.3g}"
    if same and one.keys() == two.keys():
        yield from _compare_values(_metadata(a), _metadata(b))


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return {f"metadata {key}": value for key, value in (file.metadata() or {}).items()}


def _image_difference(a: Path, b: Path) -> str:
    import numpy as np
    from PIL import Image

    with Image.open(a) as one, Image.open(b) as two:
        x, y = np.asarray(one.convert("RGB"), dtype=int), np.asarray(two.convert("RGB"), dtype=int)
    if x.shape != y.shape:
        return f"image of {x.shape[1]}x{x.shape[0]} and of {y.shape[1]}x{y.shape[0]} pixels"
    gap = np.abs(x - y)
    if not gap.any():
        return "equal pixels, but other bytes"
    return f"{(gap.max(-1) > 0).mean():.1%} of the pixels differ, by {gap.max()} of 255 at most"
