"""Variants of one epoch against a base: options, environment variables, numbers of processes, the published work.

    python benchmarks/sweep.py --variant sample.merge_lora=true --variant "sample.tail_steps=4 sample.tail_order=2" -- --preset toy
    python benchmarks/sweep.py --base work=published --variant "" -- --preset toy
    python benchmarks/sweep.py --base train.resolution=128 --variant train.resolution=256 --variant train.resolution=512 \\
        -- --preset narrow --k 1 --m 2 --batch 1 --steps 3
    python benchmarks/sweep.py --base "processes=1 OMP_NUM_THREADS=1" --variant "processes=2 OMP_NUM_THREADS=1" -- --preset toy
    python benchmarks/sweep.py --images --variant sample.tail_weights=int8 -- --preset toy --lora-scale 0.01

A variant is a list of assignments: a.b=VALUE is an option, NAME=VALUE in capitals an environment
variable (NAME= removes it), processes=N starts N processes, work=published repeats the published implementation's work;
"" is the epoch as configured. Everything after -- goes to epoch.py.

Each round launches epoch.py once for every variant, in another order each time. Ratios compare a variant with the base
within a round. --images also compares the images of the first epoch, whose prompts and seeds are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from epoch import tables
from measuring import report
from measuring.report import number, ratios, share, spread, table

EPOCH = Path(__file__).resolve().parent / "epoch.py"
RATIOS = ("epoch", "sampling", "training", "cpu")


@dataclass
class Variant:
    """One of the things that are compared."""

    label: str  # its text; "as configured" for an empty one
    options: list[str] = field(default_factory=list)  # additional arguments for epoch.py
    environment: dict[str, str] = field(default_factory=dict)  # variables to set; an empty value removes one
    processes: int = 1

    @classmethod
    def parse(cls, text: str) -> Variant:
        """A variant from its assignments; a ValueError names a part that is none."""
        found = cls(text or "as configured")
        for part in shlex.split(text):
            name, equals, value = part.partition("=")
            if not equals or not name:
                raise ValueError(f"--variant {text!r}: {part!r} is not NAME=VALUE")
            if name == "processes":
                found.processes = int(value)
            elif name == "work":
                if value not in ("published", "ours"):
                    raise ValueError(f"--variant {text!r}: work is published or ours")
                found.options += ["--published-work"] if value == "published" else []
            elif name.isupper():
                found.environment[name] = value
            else:
                found.options.append(f"--config.{name}={value}")
        return found

    def launch(self, options: Sequence[str], output: Path) -> dict[str, Any]:
        """Run epoch.py with ``options``; its report."""
        command = [sys.executable]
        if self.processes > 1:  # without the dashes torchrun reads --m itself
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.processes}", "--"]
        command += [str(EPOCH), *options, *self.options, "--label", self.label, "--output", str(output)]
        environment = {**os.environ, **self.environment}
        environment = {name: value for name, value in environment.items() if self.environment.get(name) != ""}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return json.loads(output.read_text())


def main(given: Sequence[str] | None = None) -> int:
    """Measure and write; returns 0, 2 for a variant that cannot be read, or the exit status of a failed epoch.py."""
    given = list(sys.argv[1:] if given is None else given)
    split = given.index("--") if "--" in given else len(given)
    arguments, options = parser().parse_args(given[:split]), given[split + 1 :]
    try:
        variants = [Variant.parse(text) for text in (arguments.base, *arguments.variant)]
        found = measure(arguments, variants, [*options, "--repeats", str(arguments.repeats)])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"error: {shlex.join(error.cmd)}\nended with status {error.returncode}; see above", file=sys.stderr)
        return error.returncode
    text = f"{comparison(found)}\n{tables(found)}"
    report.write(arguments.output, found, text)
    from measuring import plots

    plots.save(plots.sweep(found), arguments.output.with_suffix(".png"))
    print(f"{text}\n{arguments.output}")
    return 0


def measure(arguments: argparse.Namespace, variants: Sequence[Variant], options: list[str]) -> dict[str, Any]:
    """The report: that of epoch.py with a result for every variant."""
    launches: dict[str, list[dict]] = {variant.label: [] for variant in variants}
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="paco-benchmark-") as temporary:
        folder, images = Path(temporary), {}
        for index in range(arguments.rounds):
            for which in rng.permutation(len(variants)).tolist():
                variant = variants[which]
                print(f"round {index + 1}/{arguments.rounds}, {variant.label}", file=sys.stderr, flush=True)
                more = ["--images", str(folder / f"{which}.npz")] if arguments.images and index == 0 else []
                launches[variant.label].append(variant.launch([*options, *more], folder / "epoch.json"))
        if arguments.images:
            images = {v.label: dict(np.load(folder / f"{i}.npz")) for i, v in enumerate(variants)}
    base, first = variants[0].label, launches[variants[0].label][0]
    results = [_result(v, launches[v.label], launches[base], images.get(v.label), images.get(base)) for v in variants]
    settings = first["settings"] | {"rounds": arguments.rounds, "base": base, "epoch": options}
    peak = max((each["peak"] for each in launches[base]), key=lambda each: each["flops_per_second"])
    return report.header("sweep", settings) | {"device": first["device"], "peak": peak, "results": results}


def _result(
    variant: Variant, made: Sequence[dict], base: Sequence[dict], images: Mapping | None, base_images: Mapping | None
) -> dict[str, Any]:
    from measuring.timing import result_of

    epochs, base_epochs = (
        [epoch for launch in launches for epoch in launch["results"][0]["epochs"]] for launches in (made, base)
    )
    peak = max(launch["peak"]["flops_per_second"] for launch in made)
    first = made[0]["results"][0]
    found = first | result_of(epochs, first["flops"], peak) | {"processes": variant.processes}
    seconds, base_seconds = ([epoch[0]["seconds"] for epoch in each] for each in (epochs, base_epochs))
    found["ratio"] = {n: ratios([s[n] for s in seconds], [s[n] for s in base_seconds]) for n in RATIOS}
    found["efficiency"] = base[0]["processes"] / variant.processes / found["ratio"]["epoch"]["median"]
    if images is not None:
        found["ratio_deviation"] = float(images["ratio_deviation"])
        if images["images"].shape == base_images["images"].shape:
            difference = np.abs(images["images"].astype(float) - base_images["images"]) / 255
            found["pixel_rms"], found["pixel_max"] = float(np.sqrt((difference**2).mean())), float(difference.max())
    return found


def comparison(found: Mapping[str, Any]) -> str:
    """A Markdown table of what differs from the base."""
    results = found["results"]
    columns = [(f"{name}, ratio", [spread(r["ratio"][name], ".3f") for r in results]) for name in RATIOS]
    if len({r["config"]["train"]["resolution"] for r in results}) > 1:
        for phase in ("sampling", "training"):
            each = [r["seconds"][phase]["median"] / r["plan"]["samples"] for r in results]
            columns.append((f"{phase}, s per image", [number(value) for value in each]))
        for name in ("text_tokens", "image_tokens"):
            most = [max(forward[name] for forward in r["epochs"][0][0]["forwards"]) for r in results]
            columns.append((name.replace("_", " "), [number(value) for value in most]))
    if any(r["processes"] > 1 for r in results):
        columns.append(("efficiency", [share(r["efficiency"]) for r in results]))
        columns.append(("waiting for others", [share(r["rates"]["collectives_share"]) for r in results]))
    if "ratio_deviation" in results[0]:
        columns.append(("pixels (0 to 1), RMS", [number(r.get("pixel_rms"), ".4f") for r in results]))
        columns.append(("largest", [number(r.get("pixel_max"), ".2f") for r in results]))
        columns.append(("first ratio off by", [number(r["ratio_deviation"], ".2g") for r in results]))
    rows = [[f"`{r['label']}`", *(cells[i] for _, cells in columns)] for i, r in enumerate(results)]
    text = f"Ratios to `{found['settings']['base']}` within a round (below 1: faster), median (quartiles).\n\n"
    return text + table(["", *(name for name, _ in columns)], rows)


def parser() -> argparse.ArgumentParser:
    """The command line before --."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--base", default="", metavar="VARIANT", help="compared with (default: as configured)")
    made.add_argument("--variant", action="append", required=True, help="see above; may be repeated")
    made.add_argument("--rounds", type=int, default=3, help="launches of each variant")
    made.add_argument("--repeats", type=int, default=2, help="measured epochs per launch")
    made.add_argument("--images", action="store_true", help="compare images and the first ratio too")
    made.add_argument("--output", type=Path, default=Path("benchmarks/results/sweep.json"))
    return made


if __name__ == "__main__":
    sys.exit(main())
