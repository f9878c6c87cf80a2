"""Text to values. A key that is given twice is an error, and numbers are read as YAML 1.2.

YAML 1.1, which PyYAML implements, reads ``010`` as 8, ``1:30`` as 90, ``2026-01-02`` as a date and
``1e-3`` as a text.
"""

import ast
import re
from typing import Any

import yaml

_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_INT_PATTERN = re.compile(r"[-+]?[0-9]+$")
_FLOAT_PATTERN = re.compile(
    r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)"
    r"|\.(?:nan|NaN|NAN))$"
)
_NUMBER_STARTS = "-+.0123456789"


class RepeatedKey(ValueError):
    """A table that gives one key twice; which value is meant is not known."""


class _Loader(yaml.SafeLoader):
    """YAML with the numbers of YAML 1.2 and without repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        refuse_repeated(names)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes a text that either version of YAML would read as a number."""


_Loader.yaml_implicit_resolvers = {}
for _start, _resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items():
    _Loader.yaml_implicit_resolvers[_start] = [
        (tag, pattern) for tag, pattern in _resolvers if tag not in (_INT, _FLOAT, _TIMESTAMP)
    ]
_Loader.add_constructor(_INT, lambda loader, node: int(loader.construct_scalar(node)))
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(_INT, _INT_PATTERN, list(_NUMBER_STARTS))
    _kind.add_implicit_resolver(_FLOAT, _FLOAT_PATTERN, list(_NUMBER_STARTS))


def refuse_repeated(names: list[Any]) -> None:
    """Raise a ``RepeatedKey`` that names the first of ``names`` that occurs twice."""
    for name in names:
        if names.count(name) > 1:
            raise RepeatedKey(f"{name!r} is given twice in one table; keep one of them")


def read_yaml(text: str) -> Any:
    """The value of a YAML text, or a ``yaml.YAMLError`` or ``RepeatedKey``."""
    return yaml.load(text, Loader=_Loader)


def write_yaml(value: Any) -> str:
    """YAML from which ``read_yaml`` makes an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=True)


def read_literal(text: str) -> Any:
    """A Python or YAML value, else the text itself."""
    try:
        tree = ast.parse(text, mode="eval")
        value = ast.literal_eval(tree)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return _read_yaml_or_text(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            refuse_repeated([ast.literal_eval(key) for key in node.keys])
    return value


def _read_yaml_or_text(text: str) -> Any:
    try:
        return read_yaml(text)
    except RepeatedKey:
        raise
    except (ValueError, yaml.YAMLError, RecursionError):
        return text
