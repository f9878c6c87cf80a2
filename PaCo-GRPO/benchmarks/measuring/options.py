"""The options of config/base.py, one a line: PYTHONPATH=benchmarks python -m measuring.options."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ml_collections import ConfigDict

BASE = Path(__file__).resolve().parents[2] / "config" / "base.py"


def names(config: ConfigDict, prefix: str = "") -> Iterator[str]:
    """Dotted names of all options that are no groups."""
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            yield from names(value, f"{prefix}{key}.")
        else:
            yield prefix + key


if __name__ == "__main__":
    from paco_grpo.training.configuration import _load_module

    print("\n".join(names(_load_module(BASE).get_config())))
