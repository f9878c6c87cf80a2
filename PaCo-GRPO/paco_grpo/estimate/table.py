"""What named configurations need of a GPU (``memory.yaml``), and which suffix a smaller one takes.

An estimate takes too long for the start of a run, so ``tools/memory_table.py`` writes this table.
"""

import functools
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import yaml

from paco_grpo.options import RunOptions

FILE = Path(__file__).with_name("memory.yaml")
GIB = 2**30
# Suffix → GB of the smallest GPU that it is for. The later one costs less time.
SUFFIXES = {"_24gb": 24, "_48gb": 48, "_80gb": 80}
_SAVERS = ("pretrained.quantize", "enable_gradient_checkpointing", "speed.offload_vae")
BATCHES = ("sample.batch_size", "train.batch_size", "test.batch_size")


@dataclass(frozen=True)
class Settings:
    """By what a run of the user's own is found in the table."""

    model: str  # last part of a hub name or folder
    sizes: tuple[int, ...]  # px, in training and in evaluations
    batches: tuple[int, ...]  # values of BATCHES
    savers: tuple[str, ...]  # options that are on and save memory


@dataclass(frozen=True)
class Row:
    """What a configuration needs."""

    gpu: int | None  # GB of the smallest GPU on which it fits; None: of none
    gib: float  # that it needs there, those of CUDA itself included
    phase: str  # that needs most
    hash: str  # of the options
    settings: Settings


def settings_of(options: RunOptions) -> Settings:
    """The settings of a run."""
    return Settings(
        model=Path(options.pretrained.model).name,
        sizes=(options.train.resolution, options.test.resolution),
        batches=tuple(attrgetter(name)(options) for name in BATCHES),
        savers=tuple(name for name in _SAVERS if attrgetter(name)(options)),
    )


@functools.cache
def read() -> dict[str, Row]:
    """The rows by their configurations' names."""
    rows = {}
    for name, values in yaml.safe_load(FILE.read_text()).items():
        of_settings = {key: values.pop(key) for key in ("model", "sizes", "batches", "savers")}
        for key in ("sizes", "batches", "savers"):
            of_settings[key] = tuple(of_settings[key])
        rows[name] = Row(**values, settings=Settings(**of_settings))
    return rows


def gib_needed(options: RunOptions) -> float | None:
    """GiB that a run needs, if a configuration has the same settings: the least, if several do."""
    settings = settings_of(options)
    rows = _rows_of_model(options).values()
    return min((row.gib for row in rows if row.settings == settings), default=None)


def smaller_suffix(options: RunOptions, gib: float, needed: float | None) -> str | None:
    """The suffix with which the run needs less than now and fits on a GPU of ``gib`` GiB.

    Args:
        needed: GiB that it needs now; None: unknown, so that the suffix must turn something on.

    Returns:
        Of several, the one that costs least time; None: there is none.
    """
    savers = set(settings_of(options).savers)
    cheapest = None
    for suffix, rows in _rows_by_suffix(options).items():
        most = max(row.gib for row in rows)
        if needed is None:
            is_less = all(savers < set(row.settings.savers) for row in rows)
        else:
            is_less = most < needed
        if is_less and most <= gib:
            cheapest = suffix
    return cheapest


def advice(options: RunOptions, gib: float, needed: float) -> str:
    """What to do about a GPU of ``gib`` GiB on which ``needed`` do not fit."""
    suffix = smaller_suffix(options, gib, needed)
    if suffix:
        return f"use the configuration with the suffix {suffix}"
    for suffix, rows in _rows_by_suffix(options).items():
        gigabytes = SUFFIXES[suffix]
        if all(row.gpu and row.gpu <= gigabytes for row in rows):
            return f"the smallest GPU for it has {gigabytes} GB, with the suffix {suffix}"
    return "lower the batch sizes or resolutions"


def _rows_by_suffix(options: RunOptions) -> dict[str, list[Row]]:
    """What the model needs with each suffix at these sizes; where they are unknown, at any."""
    sizes = settings_of(options).sizes
    of_model = _rows_of_model(options)
    of_sizes = {name: row for name, row in of_model.items() if row.settings.sizes == sizes}
    by_suffix: dict[str, list[Row]] = {}
    for name, row in (of_sizes or of_model).items():
        for suffix in SUFFIXES:
            if name.endswith(suffix):
                by_suffix.setdefault(suffix, []).append(row)
    return by_suffix


def _rows_of_model(options: RunOptions) -> dict[str, Row]:
    """The rows of the model by name; none with trained or sharded weights, which no row has."""
    if options.train.sharding or not options.use_lora:
        return {}
    model = settings_of(options).model
    return {name: row for name, row in read().items() if row.settings.model == model}
