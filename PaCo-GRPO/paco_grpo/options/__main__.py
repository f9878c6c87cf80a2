"""Print docs/configuration.md: ``python -m paco_grpo.options > ../docs/configuration.md``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from paco_grpo.options.schema import GROUPS, OPTIONS, Option, RunOptions

_INTRODUCTION = """\
# Configuration

Every option of a run. This page is generated from `PaCo-GRPO/paco_grpo/options/schema.py` by
`python -m paco_grpo.options > ../docs/configuration.md` (in `PaCo-GRPO`).

A configuration file (`config/grpo.py`) sets options in Python, the command line overrides them:

```bash
bash scripts/single_node/train_flux.sh t2is --config.train.resolution=256 --config.sample.noise_steps=1,2
bash scripts/single_node/train_flux.sh t2is --noconfig.train.ema                                # sets it to False
bash scripts/single_node/train_flux.sh t2is --config.train.reward_fn.pickscore=0.5              # one entry of a table
bash scripts/single_node/train_flux.sh t2is --config.train.reward_fn='{"my.module:factory": 1}' # the whole table
bash scripts/single_node/train_flux.sh runs/NAME/config.yaml --config.run_name=AGAIN            # a saved run
```

A configuration can name code, which is then imported and run: a `.py` file, `train.loss_type`, `train.aggregate_fn`,
rewards and the `reader` of the reward `ocr`. With `--no_user_code`, `scripts/train.py`, `evaluate.py` and `generate.py` refuse
everything but what this repository has by name: use it with a configuration that you did not write.

An unknown option, a wrong type, a value out of range or a combination that cannot work is an error before any model is
loaded. `None` on the command line gives None where that is allowed.
"""
_TYPES = {
    int: "integer", float: "number", bool: "true/false", str: "text", tuple: "integers", dict: "table", object: "function", list: "text or names",
}  # fmt: skip
_HEADER = ["", "| option | type | default | meaning | range |", "|---|---|---|---|---|"]


def page() -> str:
    """The text of docs/configuration.md."""
    sections = [_INTRODUCTION, _section("config", RunOptions, "")]
    sections += [_section(f"config.{group}", kind, group) for group, kind in GROUPS.items()]
    return "\n".join(sections)


def _section(title: str, group: type, prefix: str) -> str:
    lines = [f"## `{title}`", "", inspect.cleandoc(group.__doc__), *_HEADER]
    for option in OPTIONS.values():
        if option.name.rpartition(".")[0] == prefix:
            default = ",".join(map(str, option.default)) if option.kind is tuple and option.default else option.default
            cells = (f"`{option.name}`", _TYPES[option.kind], str(default), option.meaning, ", ".join(_range(option)))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _range(option: Option) -> Iterator[str]:
    yield from (str(choice) for choice in option.choices)
    signs = (("≥", option.at_least), (">", option.above), ("≤", option.at_most), ("<", option.below))
    yield from (f"{sign} {limit:g}" for sign, limit in signs if limit is not None)


if __name__ == "__main__":
    print(page(), end="")
