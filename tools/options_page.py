"""Print docs/configuration.md: ``python tools/options_page.py > docs/configuration.md``."""

import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from paco_grpo.options.schema import GROUPS, OPTIONS, SET_OPTIONS, DatasetOptions, RunOptions

_INTRODUCTION = """\
# Configuration

Every option of a run, from `PaCo-GRPO/paco_grpo/options/schema.py`
(`python tools/options_page.py > docs/configuration.md`). A configuration file (`config/grpo.py`)
sets options in Python, the command line overrides them:

```bash
bash scripts/single_node/train_flux.sh t2is --config.train.resolution=256 --config.seed=1
# a list
bash scripts/single_node/train_flux.sh t2is --config.sample.noise_steps=1,2
# false
bash scripts/single_node/train_flux.sh t2is --config.train.ema=False
# one entry of a table
bash scripts/single_node/train_flux.sh t2is --config.train.reward_fn.pickscore=0.5
# whole tables; an empty test.reward_fn evaluates the trained rewards
bash scripts/single_node/train_flux.sh t2is --config.train.reward_fn='{"my.module:factory": 1}' \
  --config.test.reward_fn=
# a saved run
bash scripts/single_node/train_flux.sh runs/NAME/config.yaml --config.run_name=AGAIN
```

`None` on the command line gives None where that is allowed. Arguments of rewards are numbers, true,
false and null as JSON writes them, True, False and None, lists `[…]` and tables `{…}`. Anything else
is a text, such as `007`, `off` or `~`. In quotes, everything is a text: `"'7'"`.

† marks options that go beyond the published ones. The paper's settings are
[three configurations](method.md#7-named-configurations).
"""
_TYPES = {
    int: "integer",
    float: "number",
    bool: "true/false",
    str: "text",
    tuple: "integers",
    dict: "table",
}
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def page() -> str:
    """docs/configuration.md."""
    lines = [_INTRODUCTION]
    groups = {"": RunOptions} | GROUPS | {"datasets.NAME": DatasetOptions}
    for prefix, group in groups.items():
        title = f"config.{prefix}".rstrip(".")
        lines += [f"## `{title}`", "", " ".join(group.__doc__.split()), ""]
        lines += ["| option | values | default | meaning |", "|---|---|---|---|"]
        for name, option in (OPTIONS | SET_OPTIONS).items():
            if name.rpartition(".")[0] == prefix:
                default = option.get_default(call_default_factory=True)
                default = "" if option.is_required() else default
                default = ",".join(map(str, default)) if isinstance(default, tuple) else default
                values = _values(option.annotation, option.metadata)
                mark = " †" if option.json_schema_extra else ""
                lines.append(f"| `{name}`{mark} | {values} | {default} | {option.description} |")
        lines.append("")
    return "\n".join(lines)


def _values(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The values that an option takes, other than None."""
    origin = typing.get_origin(annotation)
    parts = typing.get_args(annotation)
    if origin is typing.Annotated:
        limits = []
        for field in parts[1:]:
            limits += getattr(field, "metadata", [])
        return _values(parts[0], limits)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_values(part, metadata) for part in parts if part is not type(None))
    if origin is typing.Literal:
        return ", ".join(map(str, parts))
    if origin is Callable:
        return "function"
    is_list_of_names = origin is tuple and parts[0] is str
    words = ["names" if is_list_of_names else _TYPES[origin or annotation]]
    for bound in metadata:
        for name, sign in _SIGNS.items():
            limit = getattr(bound, name, None)
            if limit is not None and limit < 100_000:  # larger ones only catch typing errors
                words.append(f"{sign} {limit:g}")
    return " ".join(words)


if __name__ == "__main__":
    print(page(), end="")
