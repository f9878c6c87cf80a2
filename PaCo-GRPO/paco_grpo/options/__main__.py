"""Print docs/configuration.md: ``python -m paco_grpo.options > ../docs/configuration.md``."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paco_grpo.options.schema import GROUPS, OPTIONS, RunOptions

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
_HEADER = ["", "| option | type | default | meaning | range |", "|---|---|---|---|---|"]
_TYPES = {int: "integer", float: "number", bool: "true/false", str: "text", tuple: "integers", dict: "table"}


def page() -> str:
    """The text of docs/configuration.md."""
    sections = [_INTRODUCTION, _section("config", RunOptions, "")]
    sections += [_section(f"config.{group}", kind, group) for group, kind in GROUPS.items()]
    return "\n".join(sections)


def _section(title: str, group: type, prefix: str) -> str:
    lines = [f"## `{title}`", "", inspect.cleandoc(group.__doc__), *_HEADER]
    for name, option in OPTIONS.items():
        if name.rpartition(".")[0] == prefix:
            default = option.get_default(call_default_factory=True)
            default = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
            kinds, limits = zip(*_alternatives(option.annotation, option.metadata), strict=True)
            cells = (f"`{name}`", " or ".join(filter(None, kinds)), default, option.description, "".join(limits))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _alternatives(annotation: Any, metadata: Sequence[Any] = ()) -> Iterator[tuple[str, str]]:
    """(type, range) of each type in ``annotation`` but None."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        declared = [limit for field in parts[1:] for limit in getattr(field, "metadata", [])]
        yield from _alternatives(parts[0], declared)
    elif origin in (typing.Union, types.UnionType):
        for part in parts:
            yield from _alternatives(part) if part is not type(None) else ()
    elif origin is typing.Literal:
        yield _TYPES[type(parts[0])], ", ".join(map(str, parts))
    elif origin is Callable:
        yield "function", ""
    else:
        kind = "names" if origin is tuple and parts[0] is str else _TYPES[origin or annotation]
        yield kind, ", ".join(filter(None, map(_limit, metadata)))


def _limit(bound: Any) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [(sign, getattr(bound, name)) for name, sign in signs.items() if hasattr(bound, name)]
    return "".join(f"{sign} {limit:g}" for sign, limit in found if limit < 2**31)  # larger ones only catch typing errors


if __name__ == "__main__":
    print(page(), end="")
