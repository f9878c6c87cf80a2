"""Configuration files, saved runs and the command line become ``RunOptions``; ``ConfigDict`` is read only here.

A command line has the form of ml_collections flags, ``--config SOURCE --config.a.b=value``. It is parsed here because
tables keyed by import paths (``--config.train.reward_fn.pkg.mod:factory=1``), saved YAML files and one-line errors are
needed. Everything that is read becomes ``{option name: value}`` first, then one frozen ``RunOptions``.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import numbers
import re
import runpy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from ml_collections import ConfigDict

from paco_grpo.options.checks import ConfigError, user_code
from paco_grpo.options.published import PUBLISHED
from paco_grpo.options.schema import GROUPS, OPTIONS, Option, RunOptions
from paco_grpo.suggest import suggestions

NO_USER_CODE = "--no_user_code"
_OWN_CONFIGURATIONS = Path(__file__).resolve().parents[2] / "config"
_NONE = ("none", "null")
_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0")
_EXPECTED = {
    tuple: "a list of integers such as 1,2", bool: "true or false", int: "an integer", float: "a number", str: "text",
    dict: "a table such as {'jpeg_compressibility': 1.0}", object: "a name, package.module:function or a function",
    list: "a text or a list of names",
}  # fmt: skip


class _Config(ConfigDict):
    """A ``ConfigDict`` to which plain dicts with any keys can be assigned. Types are checked when it is read."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, table(value) if isinstance(value, dict) else value)


def table(entries: Mapping[str, Any]) -> ConfigDict:
    """A ``ConfigDict`` whose keys may hold dots (reward names are import paths)."""
    result = _Config(type_safe=False, allow_dotted_keys=True)
    for key, value in entries.items():
        result[key] = value
    return result


def config_dict() -> ConfigDict:
    """All options with their defaults, for a configuration file to change."""
    return table(dataclasses.asdict(RunOptions()))


def read_options(arguments: Sequence[str]) -> tuple[RunOptions, str]:
    """The options that a command line gives, and the name of their configuration.

    With ``--no_user_code`` among the arguments, no file of Python is run and no module imported that they name.

    Raises:
        ConfigError: See ``parse_command_line`` and ``load_options``; or they name code.
    """
    source, overrides = parse_command_line([word for word in arguments if word != NO_USER_CODE])
    file, _, name = source.partition(":")
    trusted = NO_USER_CODE not in arguments
    if not trusted and file.endswith(".py") and Path(file).resolve().parent != _OWN_CONFIGURATIONS:
        raise ConfigError(f"{NO_USER_CODE}: {file} is a file of Python that is not in {_OWN_CONFIGURATIONS}")
    options = load_options(source, overrides)
    for place, code in () if trusted else user_code(options):
        raise ConfigError(
            f"{NO_USER_CODE}: config.{place} names code ({code!r}); read that code, and leave the option out if you trust it"
        )
    return options, name or Path(source).stem


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
        source: ``FILE.py:NAME`` (its ``get_config(NAME)`` is called), or a ``config.yaml`` saved by an earlier run.
        overrides: Pairs of dotted option name and text, as on the command line. Entries of a table are set one by one
            (``train.reward_fn.NAME``), or the whole table at once.

    Raises:
        ConfigError: There is no such file or name, an option is unknown, or a value has the wrong type.
    """
    file, _, name = str(source).partition(":")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"configuration file {file!r} does not exist (current folder: {Path.cwd()})")
    if path.suffix in (".yaml", ".yml"):
        values = _as_saved(_load_yaml(path))
    elif path.suffix == ".py":
        values = _load_python(path, name)
    else:
        raise ConfigError(f"configuration file {file!r} is neither a .py file nor the config.yaml of a saved run")
    return make_options(values, overrides)


def _load_yaml(path: Path) -> Mapping[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"configuration file {path} cannot be read ({type(error).__name__}: {reason})") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"configuration file {path} is a {type(values).__name__}, not options with their values")
    return values


def _as_saved(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """``values`` of a saved run; an option that its version did not have yet gets the value that it computed with."""
    pretrained = values.get("pretrained")
    if not isinstance(pretrained, Mapping):
        return values
    return {**values, "pretrained": {"image_positions": "stock", **pretrained}}


def _load_python(path: Path, name: str) -> Any:
    get_config = runpy.run_path(str(path), run_name="paco_grpo_run_config").get("get_config")
    if get_config is None:
        raise ConfigError(f"configuration file {path} has no function get_config")
    try:
        return get_config(name) if name else get_config()
    except KeyError as error:
        raise ConfigError(f"{path}: {error.args[0]}") from error


def make_options(values: Mapping[str, Any] | ConfigDict, overrides: Iterable[tuple[str, str]] = ()) -> RunOptions:
    """Options from nested values, as in a configuration file; what they leave out has its default.

    Raises:
        ConfigError: An unknown option, or a value of the wrong type.
    """
    flat = {name: copy.deepcopy(declared.default) for name, declared in OPTIONS.items()}
    flat |= _flatten(values.to_dict() if isinstance(values, ConfigDict) else values)
    for name, text in overrides:
        _override(flat, name, text)
    groups = {
        group: kind(**{name.partition(".")[2]: value for name, value in flat.items() if name.startswith(f"{group}.")})
        for group, kind in GROUPS.items()
    }
    return RunOptions(**{name: value for name, value in flat.items() if "." not in name}, **groups)


def _flatten(values: Any) -> dict[str, Any]:
    flat = {}
    for group in ("", *GROUPS):
        entries = values.get(group, {}) if group else values
        if not isinstance(entries, Mapping):
            raise ConfigError(f"config{group and '.'}{group} is {type(entries).__name__}, not a group of options")
        flat |= {
            f"{group}{group and '.'}{field}": value for field, value in entries.items() if group or field not in GROUPS
        }
    unknown = [_unknown(name) for name in flat if name not in OPTIONS]
    if unknown:
        raise ConfigError("\n".join(unknown))
    return {name: _checked(OPTIONS[name], value) for name, value in flat.items()}


def _unknown(name: str) -> str:
    if name in PUBLISHED:
        return f"config.{name} of the published code has another form here: {PUBLISHED[name]}"
    nearest = " or ".join(f"config.{guess}" for guess in suggestions(name, OPTIONS))
    hint = f"Did you mean {nearest}?" if nearest else "All options are in docs/configuration.md"
    return f"unknown option config.{name}. {hint}"


def _checked(declared: Option, value: Any) -> Any:
    """``value`` in the option's type: an integer becomes a float where one is expected, a list a tuple."""
    kind = declared.kind
    if value is None and declared.nullable:
        return None
    if kind is dict and not value:
        return {}  # YAML reads an empty table as None
    if kind is int and _is_integer(value):
        return int(value)
    if kind is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    if kind is tuple and isinstance(value, list | tuple) and all(map(_is_integer, value)):
        return tuple(map(int, value))
    if kind is list and isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value):
        return tuple(value)
    if kind in (dict, object) and isinstance(value, Mapping):
        return _plain(f"config.{declared.name}", value)
    alone = bool if kind is bool else str if kind in (str, list, object) else ()
    if isinstance(value, alone) or kind is object and callable(value):
        return value
    if value is None:
        raise ConfigError(f"config.{declared.name} cannot be None")
    raise ConfigError(f"config.{declared.name}={value!r} is not {_EXPECTED[kind]}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _plain(name: str, value: Any) -> Any:
    """An entry of a table in the types that a saved configuration can hold."""
    if isinstance(value, ConfigDict | Mapping):
        return {key: _plain(f"{name}.{key}", entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, entry) for entry in value]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    raise ConfigError(f"{name} is a {type(value).__name__}; only numbers, text, lists and tables can be saved")


def _override(flat: dict[str, Any], name: str, text: str) -> None:
    if name in OPTIONS:
        flat[name] = _convert(OPTIONS[name], text)
        return
    if name in GROUPS:
        raise ConfigError(f"config.{name} is a group of options; set one of them: config.{name}.NAME=VALUE")
    owner = next((known for known in OPTIONS if name.startswith(f"{known}.")), None)
    if owner is None:
        raise ConfigError(_unknown(name))
    entry = name.removeprefix(f"{owner}.")
    if OPTIONS[owner].kind is not dict:
        raise ConfigError(f"config.{owner} is a value, it has no field {entry!r}")
    value = _plain(f"config.{name}", _literal(text))
    if not owner.endswith("reward_fn_kwargs"):
        flat[owner] = {**flat[owner], entry: value}
        return
    # The reward's name may be an import path with dots; an argument's name follows the factory.
    module, colon, rest = entry.rpartition(":")
    factory, dot, argument = rest.partition(".")
    reward = module + colon + factory
    if dot:
        value = {**flat[owner].get(reward, {}), argument: value}
    elif not isinstance(value, Mapping):
        raise ConfigError(f"config.{name}={text!r} is not a table of arguments; write config.{name}.ARGUMENT=value")
    flat[owner] = {**flat[owner], reward: value}


def _convert(declared: Option, text: str) -> Any:
    """The value that ``text`` means for this option."""
    kind, stripped = declared.kind, text.strip()
    word = (text if kind is str else stripped).lower()  # one space is a text (a negative prompt)
    if declared.nullable and word in (*_NONE, ""):
        return None
    if kind in (str, object):
        return text
    try:
        if word in _NONE:
            value = None
        elif kind is bool:
            value = {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)}[word]
        elif kind is tuple:
            value = ast.literal_eval(stripped or "()")
            value = value if isinstance(value, tuple | list) else (value,)
        elif kind is dict:
            value = _literal(text) if stripped else {}
        elif kind is list:  # a comma between names makes a list; in another text it belongs to a regular expression
            names = re.fullmatch(r"[\w.]+(,[\w.]+)+", stripped)
            value = stripped.split(",") if names else _literal(text) if stripped.startswith("[") else text
        else:
            value = kind(text)
    except (ValueError, SyntaxError, KeyError):
        value = text
    return _checked(declared, value)


def _literal(text: str) -> Any:
    """An entry of a table: a Python or YAML literal, else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def options_to_dict(options: RunOptions) -> dict[str, Any]:
    """Nested plain values, from which ``make_options`` makes equal options.

    Raises:
        ConfigError: ``train.aggregate_fn`` is a function, not its description (``paco_grpo.advantages.aggregation.describe``).
    """
    return _plain("config", dataclasses.asdict(options))


def options_to_yaml(options: RunOptions) -> str:
    """The text of a run's config.yaml; ``load_options`` reads it back to equal options. Raises as ``options_to_dict``."""
    return yaml.safe_dump(options_to_dict(options), sort_keys=True)
