"""Configuration files, saved runs and the command line become ``RunOptions``; ``ConfigDict`` is read only here.

A command line has the form of ml_collections flags, ``--config SOURCE --config.a.b=value``, whose own parser knows no
tables keyed by import paths (``--config.train.reward_fn.pkg.mod:factory=1``) and no YAML files.
"""

import ast
import dataclasses
import difflib
import runpy
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from ml_collections import ConfigDict
from pydantic import TypeAdapter, ValidationError

from paco_grpo.options.schema import OPTIONS, RunOptions

_RUN_OPTIONS = TypeAdapter(RunOptions)
_MODULE = "paco_grpo_run_config"  # the name of a configuration file while it runs


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the option."""


class _Config(ConfigDict):
    """A ``ConfigDict`` whose keys may hold dots (reward names are import paths), without checks of types."""

    def __init__(self, entries: Mapping[str, Any] = {}) -> None:
        super().__init__(type_safe=False, allow_dotted_keys=True)
        for key, value in entries.items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, _Config(value) if isinstance(value, dict) else value)


def config_dict() -> ConfigDict:
    """All options with their defaults, for a configuration file to change."""
    return _Config(dataclasses.asdict(RunOptions()))


def read_options(arguments: Sequence[str]) -> tuple[RunOptions, str]:
    """The options that a command line gives, and the name of their configuration; see ``load_options``."""
    source, overrides = parse_command_line(arguments)
    return load_options(source, overrides), source.partition(":")[2] or Path(source).stem


def parse_command_line(arguments: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """Split ``--config SOURCE --config.key=value …`` into the source and its overrides, in order."""
    source, overrides, rest = None, [], list(arguments)
    while rest:
        argument, equals, value = rest.pop(0).partition("=")
        name = argument.lstrip("-")
        if argument.startswith("--noconfig."):
            overrides.append((name.removeprefix("noconfig."), "false"))
            continue
        if not argument.startswith("-") or name != "config" and not name.startswith("config."):
            raise ConfigError(
                f"unknown argument {argument!r}. Options are given as --config FILE[:NAME] and --config.a.b=value"
            )
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"argument {argument!r} has no value; write {argument}=VALUE")
            value = rest.pop(0)
        if name == "config":
            source = value
        else:
            overrides.append((name.removeprefix("config."), value))
    if source is None:
        raise ConfigError("no configuration given; start with --config config/grpo.py:NAME")
    return source, overrides


def load_options(source: str, overrides: Iterable[tuple[str, str]] = ()) -> RunOptions:
    """The options in a file.

    Args:
        source: ``FILE.py:NAME`` or a ``config.yaml`` saved by an earlier run. NAME is a public function of the file
            that returns a ``ConfigDict``, or what the file's ``get_config`` knows.
        overrides: Pairs of dotted name and text, as on the command line, of an option or of an entry of a table.
    """
    file, _, name = str(source).partition(":")
    path = Path(file)
    if not path.is_file() or path.suffix not in (".py", ".yaml", ".yml"):
        raise ConfigError(
            f"configuration {file!r} is not a .py or .yaml file (current folder: {Path.cwd()})"
        )
    if path.suffix == ".py":
        return make_options(_load_python(path, name), overrides)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(
            f"configuration file {path} cannot be read: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"configuration file {path} is a {type(values).__name__}, not options with their values"
        )
    return make_options(values, overrides)


def _load_python(path: Path, name: str) -> ConfigDict:
    names = runpy.run_path(str(path), run_name=_MODULE)
    function, arguments = names.get(name), []
    if (
        getattr(function, "__module__", "") != _MODULE
        or name.startswith("_")
        or name == "get_config"
    ):
        function, arguments = names.get("get_config"), [name] if name else []
    if function is None:
        raise ConfigError(f"configuration file {path} has no function {name or 'get_config'}")
    try:
        found = function(*arguments)
    except (
        AttributeError,
        KeyError,
    ) as error:  # ConfigDict puts its KeyError into an AttributeError
        words = getattr(error.args[0], "args", error.args)[0]
        raise ConfigError(f"{path}: {' '.join(str(words).split())}") from error
    if not isinstance(found, ConfigDict):
        raise ConfigError(
            f"{path}: {name or 'get_config'} returns {type(found).__name__}, not a ConfigDict"
        )
    return found


def make_options(
    values: Mapping[str, Any] | ConfigDict, overrides: Iterable[tuple[str, str]] = ()
) -> RunOptions:
    """Options from nested values, or defaults; a ``ConfigError`` has a line for each problem."""
    values = _plain(values)
    for name, text in overrides:
        _override(values, name, text)
    try:
        return _RUN_OPTIONS.validate_python(values)
    except ValidationError as error:
        raise ConfigError("\n".join(dict.fromkeys(map(_problem, error.errors())))) from error


def _plain(value: Any) -> Any:
    """``value`` without ``ConfigDict``, tuples and NumPy's numbers."""
    if isinstance(value, ConfigDict | Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value.item() if isinstance(value, np.generic) else value


def _problem(error: Mapping[str, Any]) -> str:
    """One line on one error of pydantic; it begins with the option's name."""
    words = [str(word) for word in error["loc"]]
    depth = next((n for n in (1, 2) if ".".join(words[:n]) in OPTIONS), len(words))
    option = ".".join(words[:depth])
    if option not in OPTIONS:
        return (
            _unknown(option)
            if error["type"] == "unexpected_keyword_argument"
            else f"config.{option}: {error['msg']}"
        )
    entry = (
        words[depth:] if option.endswith(("reward_fn", "kwargs")) else []
    )  # else the alternatives of a union
    return f"config.{'.'.join([option, *entry])}={error['input']!r}: {error['msg'].removeprefix('Value error, ')}"


def _unknown(name: str) -> str:
    same = [
        option for option in OPTIONS if option.rpartition(".")[2] == name.rpartition(".")[2]
    ]  # in another group
    nearest = [
        f"config.{option}"
        for option in same or difflib.get_close_matches(name, OPTIONS, cutoff=0.7)
    ]
    hint = f"Did you mean {' or '.join(nearest)}?"
    elsewhere = "All are in docs/configuration.md, the published code's in docs/real-weights.md"
    return f"unknown option config.{name}. {hint if nearest else elsewhere}"


def _override(values: dict[str, Any], name: str, text: str) -> None:
    """Set the option or the entry of a table that the command line calls ``name``."""
    option = (
        name
        if name in OPTIONS
        else next((known for known in OPTIONS if name.startswith(f"{known}.")), None)
    )
    if option is None:
        raise ConfigError(_unknown(name))
    group, _, field = option.rpartition(".")
    place = values.setdefault(group, {}) if group else values
    if name == option:
        place[field] = _value(text, OPTIONS[option].annotation)
        return
    if OPTIONS[option].default_factory is not dict:
        raise ConfigError(
            f"config.{option} is a value, it has no field {name.removeprefix(f'{option}.')!r}"
        )
    entry, table = name.removeprefix(f"{option}."), place.setdefault(field, {})
    if option.endswith("reward_fn_kwargs"):
        # The reward's name may be an import path with dots; an argument's name follows the factory.
        module, colon, rest = entry.rpartition(":")
        factory, dot, argument = rest.partition(".")
        entry = module + colon + factory
        if dot:
            table, entry = table.setdefault(entry, {}), argument
    table[entry] = _plain(_literal(text))


def _value(text: str, annotation: Any) -> Any:
    """What ``text`` means for an option of this type: a text stays as it is."""
    several = typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Literal)
    kinds = typing.get_args(annotation) if several else (annotation,)
    if type(None) in kinds and text.lower() in ("none", "null", ""):
        return None
    takes_text = any(kind is str or isinstance(kind, str) for kind in kinds)
    return text if takes_text and text[:1] not in ("[", "{") else _plain(_literal(text.strip()))


def _literal(text: str) -> Any:
    """A Python or YAML value, else the text itself."""
    for read in (ast.literal_eval, yaml.safe_load):
        try:
            return read(text)
        except (ValueError, SyntaxError, yaml.YAMLError, RecursionError, MemoryError):
            continue
    return text


def options_to_dict(options: RunOptions) -> dict[str, Any]:
    """Nested plain values, from which ``make_options`` makes equal options.

    Of ``train.aggregate_fn``, only its description can be saved (``advantages.aggregation.describe``), not a function.
    """
    return _RUN_OPTIONS.dump_python(options, mode="json")


def options_to_yaml(options: RunOptions) -> str:
    return yaml.safe_dump(options_to_dict(options), sort_keys=True)
