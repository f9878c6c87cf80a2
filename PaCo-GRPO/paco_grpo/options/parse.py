"""Configuration files, saved runs and the command line become ``RunOptions``; ``ConfigDict`` is read only here.

A command line has the form of ml_collections flags, ``--config SOURCE --config.a.b=value``. It is parsed here because
tables keyed by import paths (``--config.train.reward_fn.pkg.mod:factory=1``) and saved YAML files are needed.
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
from pydantic_core import PydanticSerializationError

from paco_grpo.options.schema import GROUPS, OPTIONS, RunOptions

_RUN_OPTIONS = TypeAdapter(RunOptions)
_MODULE = "paco_grpo_run_config"  # the name of a configuration file while it runs


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the option and what to do."""


class _Config(ConfigDict):
    """A ``ConfigDict`` whose keys may hold dots (reward names are import paths). Types are checked when it is read."""

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
    """Split ``--config SOURCE --config.key=value …`` into the source and its overrides, in order.

    Raises:
        ConfigError: No source, or an argument that is neither.
    """
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
        overrides: Pairs of dotted option name and text, as on the command line. Entries of a table are set one by one
            (``train.reward_fn.NAME``), or the whole table at once.

    Raises:
        ConfigError: There is no such file or name, an option is unknown, or a value has the wrong type.
    """
    file, _, name = str(source).partition(":")
    path = Path(file)
    if not path.is_file() or path.suffix not in (".py", ".yaml", ".yml"):
        raise ConfigError(f"configuration {file!r} is not a .py or .yaml file (current folder: {Path.cwd()})")
    if path.suffix == ".py":
        return make_options(_load_python(path, name), overrides)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"configuration file {path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"configuration file {path} is a {type(values).__name__}, not options with their values")
    return make_options(values, overrides)


def _load_python(path: Path, name: str) -> ConfigDict:
    names = runpy.run_path(str(path), run_name=_MODULE)
    function, arguments = names.get(name), []
    if getattr(function, "__module__", "") != _MODULE or name.startswith("_") or name == "get_config":
        function, arguments = names.get("get_config"), [name] if name else []
    if function is None:
        raise ConfigError(f"configuration file {path} has no function {name or 'get_config'}")
    try:
        found = function(*arguments)
    except KeyError as error:
        raise ConfigError(f"{path}: {error.args[0]}") from error
    if not isinstance(found, ConfigDict):
        raise ConfigError(f"{path}: {name or 'get_config'} returns {type(found).__name__}, not a ConfigDict")
    return found


def make_options(values: Mapping[str, Any] | ConfigDict, overrides: Iterable[tuple[str, str]] = ()) -> RunOptions:
    """Options from nested values, as in a configuration file; what they leave out has its default.

    Raises:
        ConfigError: A line for each unknown option and each wrong value.
    """
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
        return _unknown(option) if error["type"] == "unexpected_keyword_argument" else f"config.{option}: {error['msg']}"
    entry = words[depth:] if option.endswith(("reward_fn", "kwargs")) else []  # else the alternatives of a union
    return f"config.{'.'.join([option, *entry])}={error['input']!r}: {error['msg'].removeprefix('Value error, ')}"


def _unknown(name: str) -> str:
    last = name.rpartition(".")[2]
    nearest = [option for option in OPTIONS if option.rpartition(".")[2] == last]
    nearest = nearest or difflib.get_close_matches(name, OPTIONS, n=1, cutoff=0.7)
    if nearest:
        return f"unknown option config.{name}. Did you mean {' or '.join(f'config.{guess}' for guess in nearest[:3])}?"
    return f"unknown option config.{name}. All are in docs/configuration.md, the published code's in docs/real-weights.md"


def _override(values: dict[str, Any], name: str, text: str) -> None:
    """Set the option or the entry of a table that the command line calls ``name``."""
    option = name if name in OPTIONS else next((known for known in OPTIONS if name.startswith(f"{known}.")), None)
    if option is None:
        group = f"config.{name} is a group of options; set one of them: config.{name}.NAME=VALUE"
        raise ConfigError(group if name in GROUPS else _unknown(name))
    group, _, field = option.rpartition(".")
    place = values.setdefault(group, {}) if group else values
    if name == option:
        place[field] = _value(text, OPTIONS[option].annotation)
        return
    if OPTIONS[option].default_factory is not dict:
        raise ConfigError(f"config.{option} is a value, it has no field {name.removeprefix(f'{option}.')!r}")
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

    Raises:
        ConfigError: ``train.aggregate_fn`` is a function, not its description (``advantages.aggregation.describe``).
    """
    try:
        return _RUN_OPTIONS.dump_python(options, mode="json")
    except PydanticSerializationError as error:
        raise ConfigError(f"config.train.aggregate_fn={options.train.aggregate_fn!r} cannot be saved") from error


def options_to_yaml(options: RunOptions) -> str:
    """The text of a run's config.yaml, which ``load_options`` reads. Raises as ``options_to_dict``."""
    return yaml.safe_dump(options_to_dict(options), sort_keys=True)
