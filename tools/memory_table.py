"""Estimate the named configurations, alone and with each memory suffix (about half an hour on one core).

    python tools/memory_table.py

Writes PaCo-GRPO/paco_grpo/estimate/memory.yaml, by which estimate.py, the start of a run and the
message at an out-of-memory name the suffix that fits. Each row has a hash of its options. Rows whose
options are unchanged are kept, so it continues where it was interrupted.

No hash knows how an estimate is computed. Give --all after a change of paco_grpo/estimate, of a
model in architectures.py, of what a policy or an objective computes, or of torch or diffusers.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the libraries read it
GRPO = Path(__file__).resolve().parents[1] / "PaCo-GRPO"
sys.path[:0] = [str(GRPO), str(GRPO / "tests")]

from diffusers.utils import logging as diffusers_logging
from named import REAL, load
from transformers.utils import logging as transformers_logging

from paco_grpo.estimate import generator
from paco_grpo.estimate.report import GPUS
from paco_grpo.estimate.table import FILE, GIB, SUFFIXES, Row, read, settings_of
from paco_grpo.objectives import create_objective
from paco_grpo.options import OPTIONS, RunOptions
from paco_grpo.options.parse import options_to_dict
from paco_grpo.training.state import Plan, make_plan

# These have adapters, references and passes of their own.
OBJECTIVES = ("_nft", "_awm", "_dgpo", "_flow_dppo")
# GB of a GPU → the smallest that is sold as such.
CARDS = {24: "RTX 4090 24GB", 48: "L40S 48GB", 80: "H100 80GB", 141: "H200 141GB"}
# Options on which no shape depends.
UNREAD = """
    project_name run_name seed save_dir save_freq eval_freq num_checkpoint_limit num_epochs dataset
    datasets health speed pretrained.quantize sample.global_std test.num_steps test.num_images
    test.seed test.reward_fn test.reward_fn_kwargs train.reward_fn train.reward_fn_kwargs
    train.aggregate_fn train.learning_rate train.adam_beta2 train.ema train.ema_decay
"""


def row_names() -> list[str]:
    """The configurations of the table, in its order."""
    names = []
    for name in REAL:
        names += [name + suffix for suffix in SUFFIXES]
    for name in ("t2is", "qwen_editing", "sd3_ocr"):
        for objective in OBJECTIVES:
            names += [name + objective + suffix for suffix in SUFFIXES]
    return names + REAL


def hash_of(options: RunOptions) -> str:
    """Of all options but those that are off and are off by default.

    So any change of a configuration or of a default changes it, and a new option that is off
    does not.
    """
    defaults = RunOptions()
    values = {}
    for name in OPTIONS:
        value = attrgetter(name)(options)
        if attrgetter(name)(defaults) or value != attrgetter(name)(defaults):
            values[name] = value
    text = json.dumps(values, sort_keys=True, default=asdict)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def shapes_of(options: RunOptions) -> str:
    """Equal for configurations whose tensors have the same shapes."""
    values = options_to_dict(options)
    values["sample"]["noise_level"] = bool(options.sample.noise_level)
    for name in UNREAD.split():
        group, _, option = name.rpartition(".")
        del (values[group] if group else values)[option]
    return json.dumps(values)


def rows_of(configurations: Mapping[str, RunOptions]) -> dict[str, Row]:
    """The rows of configurations with the same shapes."""
    options = next(iter(configurations.values()))
    objective = create_objective(options)
    plan = make_plan(options, 1, objective.gradient_steps)
    pieces = generator.measure_pieces(options, plan, objective)
    return {name: row_of(options, plan, pieces) for name, options in configurations.items()}


def row_of(options: RunOptions, plan: Plan, pieces: generator.Pieces) -> Row:
    """What is needed on the smallest GPU on which it fits, otherwise on the largest."""
    fits = False
    for gigabytes, card in CARDS.items():
        gib = GPUS[card][0]
        resident, adds = generator.memory(options, plan, pieces, gib * GIB)
        peaks = generator.Estimate("", {}, None, resident, adds).peaks
        phase = max(peaks, key=peaks.__getitem__)
        needed = (peaks[phase] + generator.RESERVE) / GIB
        fits = needed <= gib
        if fits:
            break
    return Row(
        gpu=gigabytes if fits else None,
        gib=round(needed, 1),
        phase=phase,
        hash=hash_of(options),
        settings=settings_of(options),
    )


def write(rows: Mapping[str, Row]) -> None:
    """Write the table, a row a line."""
    lines = ["# What configurations need of a GPU: written by tools/memory_table.py\n"]
    for name, row in rows.items():
        values = asdict(row)
        values |= values.pop("settings")
        lines.append(f"{name}: {json.dumps(values)}\n".replace('"', ""))
    FILE.write_text("".join(lines))


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--all", action="store_true", help="estimate every row again")
    arguments = parser.parse_args(words)
    for library in (diffusers_logging, transformers_logging):
        library.disable_progress_bar()
        library.set_verbosity_error()
    earlier = read() if FILE.exists() and not arguments.all else {}
    rows = {}
    missing: dict[str, dict[str, RunOptions]] = {}  # by shapes
    for name in row_names():
        options = load(name)
        if name in earlier and earlier[name].hash == hash_of(options):
            rows[name] = earlier[name]
        else:
            missing.setdefault(shapes_of(options), {})[name] = options
    for configurations in missing.values():
        rows |= rows_of(configurations)
        for name in configurations:
            print(f"{name}: {rows[name].gib} GiB ({rows[name].phase})", flush=True)
        write({name: rows[name] for name in row_names() if name in rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
