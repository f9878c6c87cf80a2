"""Configuration files, saved runs and the command line become ``RunOptions``.

A command line has the form of ml_collections flags, ``--config SOURCE --config.a.b=value``, whose
own parser knows no tables keyed by import paths (``--config.train.reward_fn.pkg.mod:factory=1``)
and no YAML files.
"""

import dataclasses
import difflib
import inspect
import logging
import runpy
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from ml_collections import ConfigDict
from pydantic import TypeAdapter, ValidationError

from paco_grpo.options.literals import RepeatedKey, read_literal, read_yaml, write_yaml
from paco_grpo.options.published import PUBLISHED, PUBLISHED_VALUES
from paco_grpo.options.schema import OPTIONS, RunOptions
from paco_grpo.suggest import did_you_mean

logger = logging.getLogger(__name__)

_RUN_OPTIONS = TypeAdapter(RunOptions)
_MODULE = "paco_grpo_run_config"  # the name of a configuration file while it runs


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the option."""


class _Config(ConfigDict):
    """A ``ConfigDict`` without checks of types, whose keys, such as import paths, may hold dots."""

    def __init__(self, entries: Mapping[str, Any] = {}) -> None:
        super().__init__(type_safe=False, allow_dotted_keys=True)
        for key, value in entries.items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, _Config(value) if isinstance(value, dict) else value)


def config_dict() -> ConfigDict:
    """All options with their defaults, for a configuration file to change."""
    return _Config(dataclasses.asdict(RunOptions()))


# --- the command line ----------------------------------------------------------------------------


def read_options(arguments: Sequence[str]) -> tuple[RunOptions, str]:
    """The options of a command line, and the name of their configuration; see ``load_options``."""
    source, overrides = parse_command_line(arguments)
    name = source.partition(":")[2] or Path(source).stem
    return load_options(source, overrides), name


def parse_command_line(arguments: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """Split ``--config SOURCE --config.key=value …`` into the source and the overrides."""
    source = None
    overrides = []
    rest = list(arguments)
    while rest:
        argument, equals, value = rest.pop(0).partition("=")
        name = argument.lstrip("-")
        if argument.startswith("--noconfig."):
            overrides.append((name.removeprefix("noconfig."), "false"))
            continue
        is_option = name == "config" or name.startswith("config.")
        if not argument.startswith("-") or not is_option:
            raise ConfigError(
                f"unknown argument {argument!r}. "
                "Options are given as --config FILE[:NAME] and --config.a.b=value"
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


# --- configuration files -------------------------------------------------------------------------


def load_options(source: str, overrides: Iterable[tuple[str, str]] = ()) -> RunOptions:
    """The options in a file.

    Args:
        source: ``FILE.py:NAME`` (see ``named_configuration``) or a ``config.yaml`` saved by an
            earlier run.
        overrides: Pairs of dotted name and text, as on the command line, of an option or of an
            entry of a table.
    """
    file, _, name = str(source).partition(":")
    path = Path(file)
    if path.suffix not in (".py", ".yaml", ".yml"):
        raise ConfigError(f"configuration {file!r} is not a .py or .yaml file")
    if not path.is_file():
        raise ConfigError(f"configuration file {file} does not exist (looked from {Path.cwd()})")
    if path.suffix == ".py":
        values = _read_python(path, name)
    else:
        values = _read_yaml_file(path)
    return make_options(values, overrides, source=str(path))


def _read_yaml_file(path: Path) -> Mapping[str, Any]:
    try:
        values = read_yaml(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"configuration file {path} cannot be read: {reason}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"configuration file {path} is a {type(values).__name__}, not options with their values"
        )
    return values


def _read_python(path: Path, name: str) -> ConfigDict:
    names = runpy.run_path(str(path), run_name=_MODULE)
    try:
        config = named_configuration(names, name)
    except (AttributeError, KeyError) as error:
        # ConfigDict puts its KeyError into an AttributeError.
        inner = error.args[0] if error.args else error
        reason = getattr(inner, "args", error.args)[0]
        raise ConfigError(f"{path}: {' '.join(str(reason).split())}") from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(
            f"{path}: {name or 'get_config'} returns {type(config).__name__}, not a ConfigDict"
        )
    return config


def named_configuration(names: Mapping[str, Any], name: str) -> Any:
    """The configuration that a file, which defines ``names``, calls ``name``.

    It is what the public function ``name`` returns. ``name`` may end in keys of the file's table
    ``SUFFIXES``, in any order; their functions then change the configuration, unless the file has a
    function for the name with that suffix. A file may instead have a function ``get_config``, which
    gets ``name``, or nothing where no name is given.

    Raises:
        KeyError: There is no such configuration.
    """
    functions = _configurations(names)
    changes = names.get("SUFFIXES", {})
    base = name
    suffixes: list[str] = []
    while base not in functions:
        suffix = next((suffix for suffix in changes if base.endswith(suffix)), None)
        if suffix is None:
            break
        base = base.removesuffix(suffix)
        suffixes.insert(0, suffix)
    if base not in functions:
        if "get_config" in names:
            return names["get_config"](*([name] if name else []))
        raise KeyError(_no_configuration(name, functions, changes))
    for suffix in list(suffixes):
        if base + suffix in functions:
            base += suffix
            suffixes.remove(suffix)
    config = functions[base]()
    for suffix in suffixes:
        changes[suffix](config)
    return config


def _configurations(names: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """The public functions that a file defines itself and that can be called without arguments."""
    functions = {}
    for name, value in names.items():
        if name.startswith("_") or name == "get_config":
            continue
        if not inspect.isfunction(value) or value.__module__ != _MODULE:
            continue
        parameters = inspect.signature(value).parameters.values()
        if all(parameter.default is not parameter.empty for parameter in parameters):
            functions[name] = value
    return functions


def _no_configuration(name: str, known: Iterable[str], suffixes: Iterable[str]) -> str:
    message = f"there is no configuration {name!r}." if name else "name a configuration."
    message += f"{did_you_mean(name, known)} Known: {', '.join(sorted(known)) or 'none'}"
    if suffixes:
        return f"{message}, each also with {', '.join(suffixes)}"
    return f"{message}. For suffixes such as _nft, import SUFFIXES from config.grpo"


# --- values --------------------------------------------------------------------------------------


def make_options(
    values: Mapping[str, Any] | ConfigDict,
    overrides: Iterable[tuple[str, str]] = (),
    source: str | None = None,
) -> RunOptions:
    """Options from nested values, or defaults; a ``ConfigError`` has a line for each problem.

    Args:
        source: The file that ``values`` come from, for messages.
    """
    values = _plain(values)
    overrides = list(overrides)
    rewards_of_file = _reward_names(values)
    for name, text in overrides:
        _override(values, name, text)
    _drop_arguments_of_replaced_rewards(values, rewards_of_file, overrides)
    changed = {_option_of(name) for name, _ in overrides}
    try:
        return _RUN_OPTIONS.validate_python(values)
    except ValidationError as error:
        problems = []
        for detail in error.errors():
            option, problem = _problem(detail)
            is_of_file = source is not None and option not in changed
            problems.append(f"{source}: {problem}" if is_of_file else problem)
        raise ConfigError("\n".join(dict.fromkeys(problems))) from error


def _plain(value: Any) -> Any:
    """``value`` without ``ConfigDict``, tuples and NumPy's numbers."""
    if isinstance(value, ConfigDict | Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value.item() if isinstance(value, np.generic) else value


def _problem(error: Mapping[str, Any]) -> tuple[str, str]:
    """The option that an error of pydantic is about, and one line on it."""
    words = [str(word) for word in error["loc"]]
    depth = next((n for n in (1, 2) if ".".join(words[:n]) in OPTIONS), len(words))
    option = ".".join(words[:depth])
    if option not in OPTIONS:
        if error["type"] == "unexpected_keyword_argument":
            return option, _unknown(option)
        return option, f"config.{option}: {error['msg']}"
    is_table = option.endswith(("reward_fn", "kwargs"))
    entry = words[depth:] if is_table else []  # else the alternatives of a union
    value = error["input"]
    message = error["msg"].removeprefix("Value error, ")
    if isinstance(value, str) and (option, value) in PUBLISHED_VALUES:
        message += f"; the published code's {value}: {PUBLISHED_VALUES[option, value]}"
    return option, f"config.{'.'.join([option, *entry])}={value!r}: {message}"


def _unknown(name: str) -> str:
    if name in PUBLISHED:
        return f"config.{name} is an option of the published code. Here: {PUBLISHED[name]}"
    field = name.rpartition(".")[2]
    nearest = [option for option in OPTIONS if option.rpartition(".")[2] == field]
    if not nearest:
        nearest = difflib.get_close_matches(name, OPTIONS, cutoff=0.7)
    if not nearest:
        return (
            f"unknown option config.{name}. All are in docs/configuration.md, "
            "the published code's in docs/real-weights.md"
        )
    hint = " or ".join(f"config.{option}" for option in nearest)
    return f"unknown option config.{name}. Did you mean {hint}?"


# --- overrides -----------------------------------------------------------------------------------


def _option_of(name: str) -> str:
    """The option that ``name`` names, or of whose table it names an entry."""
    if name in OPTIONS:
        return name
    for option in OPTIONS:
        if name.startswith(f"{option}."):
            return option
    raise ConfigError(_unknown(name))


def _override(values: dict[str, Any], name: str, text: str) -> None:
    """Set the option or the entry of a table that the command line calls ``name``."""
    option = _option_of(name)
    group, _, field = option.rpartition(".")
    place = _table(values, group, group) if group else values
    try:
        if name == option:
            place[field] = _value(text, OPTIONS[option].annotation)
            return
        value = _plain(read_literal(text))
    except RepeatedKey as error:
        raise ConfigError(f"config.{name}: {error}") from error
    entry = name.removeprefix(f"{option}.")
    if OPTIONS[option].default_factory is not dict:
        raise ConfigError(f"config.{option} is a value, it has no field {entry!r}")
    table = _table(place, field, option)
    if option.endswith("reward_fn_kwargs"):
        # The reward's name may be an import path with dots; an argument's name follows the factory.
        module, colon, rest = entry.rpartition(":")
        factory, dot, argument = rest.partition(".")
        entry = module + colon + factory
        if dot:
            table = _table(table, entry, f"{option}.{entry}")
            entry = argument
    table[entry] = value


def _table(parent: dict[str, Any], key: str, name: str) -> dict[str, Any]:
    """The table ``key`` of ``parent``; it is made where nothing is there."""
    if parent.get(key) in (None, ""):
        parent[key] = {}
    if not isinstance(parent[key], dict):
        raise ConfigError(f"config.{name}={parent[key]!r} is a value, it has no fields")
    return parent[key]


def _value(text: str, annotation: Any) -> Any:
    """What ``text`` means for an option of this type: a text stays as it is."""
    has_alternatives = typing.get_origin(annotation) in (
        typing.Union,
        types.UnionType,
        typing.Literal,
    )
    kinds = typing.get_args(annotation) if has_alternatives else (annotation,)
    if type(None) in kinds and text.lower() in ("none", "null", ""):
        return None
    takes_text = any(kind is str or isinstance(kind, str) for kind in kinds)
    if takes_text and text[:1] not in ("[", "{"):
        return text
    return _plain(read_literal(text.strip()))


def _reward_names(values: Mapping[str, Any]) -> dict[str, set[str]]:
    """The names of the rewards of training and of evaluation, where they are tables."""
    names = {}
    for split in ("train", "test"):
        group = values.get(split)
        rewards = group.get("reward_fn") if isinstance(group, Mapping) else None
        names[split] = set(rewards) if isinstance(rewards, Mapping) else set()
    return names


def _drop_arguments_of_replaced_rewards(
    values: dict[str, Any],
    rewards_of_file: Mapping[str, set[str]],
    overrides: Sequence[tuple[str, str]],
) -> None:
    """Drop a file's arguments of rewards that the command line replaced.

    Others that fit no reward stay an error.
    """
    before = rewards_of_file["train"] | rewards_of_file["test"]
    now = _reward_names(values)
    replaced = before - now["train"] - now["test"]
    for split in ("train", "test"):
        option = f"{split}.reward_fn_kwargs"
        group = values.get(split)
        arguments = group.get("reward_fn_kwargs") if isinstance(group, dict) else None
        if not isinstance(arguments, dict):
            continue
        if any(name == option for name, _ in overrides):
            continue  # the command line gives the whole table
        for reward in sorted(replaced & set(arguments)):
            path = f"{option}.{reward}"
            if any(name == path or name.startswith(f"{path}.") for name, _ in overrides):
                continue
            del arguments[reward]
            logger.info(
                "config.%s is dropped: %s was replaced and is no reward of this run", path, reward
            )


# --- saving --------------------------------------------------------------------------------------


def options_to_dict(options: RunOptions) -> dict[str, Any]:
    """Nested plain values, from which ``make_options`` makes equal options.

    Of ``train.aggregate_fn``, only its description can be saved
    (``advantages.aggregation.describe``), not a function.
    """
    return _RUN_OPTIONS.dump_python(options, mode="json")


def options_to_yaml(options: RunOptions) -> str:
    """The text of a run's config.yaml."""
    return write_yaml(options_to_dict(options))
