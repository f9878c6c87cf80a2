"""Hashes that tell whether something is what it was.

Any package may import this; it imports nothing of ours.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_SAMPLES = 16
_SAMPLE_BYTES = 4096


def hash_value(value: Any) -> str:
    """SHA-256 (hexadecimal) of a value that JSON can hold; other objects count as their text."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def hash_samples(files: Iterable[Path]) -> str:
    """SHA-256 (hexadecimal) of 16 parts of each file: gigabytes of weights in milliseconds."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as content:
            for part in range(_SAMPLES):
                content.seek(size * part // _SAMPLES)
                digest.update(content.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def hash_middles(files: Iterable[Path]) -> str:
    """SHA-256 (hexadecimal) of the size and the middle of each file: one short read for an image.

    Compressed images that differ anywhere differ there too.
    """
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as content:
            content.seek(size // 2)
            digest.update(content.read(_SAMPLE_BYTES))
    return digest.hexdigest()
