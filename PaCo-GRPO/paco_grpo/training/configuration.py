"""Reading, overriding and saving a run's configuration.

The set of options is closed: an unknown key is an error that names the nearest right one. Command lines look as
ml_collections' flags do (``--config FILE[:NAME] --config.a.b=value``); they are read here and not by its flag module
because tables keyed by import paths (``--config.train.reward_fn.pkg.mod:factory=1``), saved YAML configurations and
one-line errors are needed.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from ml_collections import ConfigDict, FieldReference

_NONE = ("none", "null")
_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0")


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the option and what to do."""


def parse_command_line(arguments: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """Split ``--config SOURCE --config.key=value …`` into the source and its overrides, in order.

    Raises:
        ConfigError: No source, or an argument that is neither.
    """
    source, overrides, rest = None, [], list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name.startswith("--no") and name[4:].startswith("config."):
            overrides.append((name[4:].removeprefix("config."), "false"))
            continue
        if name.lstrip("-") != "config" and not name.lstrip("-").startswith("config.") or not name.startswith("-"):
            raise ConfigError(
                f"unknown argument {name!r}. Options are given as --config FILE[:NAME] and --config.a.b=value"
            )
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"argument {name!r} has no value; write {name}=VALUE")
            value = rest.pop(0)
        if name.lstrip("-") == "config":
            source = value
        else:
            overrides.append((name.lstrip("-").removeprefix("config."), value))
    if source is None:
        raise ConfigError("no configuration given; start with --config config/grpo.py:NAME")
    return source, overrides


def read_config(arguments: Sequence[str], base_file: Path) -> tuple[ConfigDict, str]:
    """The configuration that a command line asks for, and the name it has there (or its file's).

    Raises:
        ConfigError: See ``parse_command_line``, ``load_config`` and ``apply_overrides``.
    """
    source, overrides = parse_command_line(arguments)
    config = load_config(source, base_file)
    apply_overrides(config, overrides)
    return config, source.partition(":")[2] or Path(source).stem


def load_config(source: str, base_file: Path) -> ConfigDict:
    """The configuration at ``source``: ``FILE.py:NAME``, or a ``config.yaml`` saved by an earlier run.

    Args:
        source: What followed ``--config``.
        base_file: The Python file whose ``get_config()`` knows every option (used for saved configurations).

    Raises:
        ConfigError: There is no such file or name, or a saved file has an unknown key.
    """
    file, _, name = source.partition(":")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"configuration file {file!r} does not exist (looked from {Path.cwd()})")
    if path.suffix in (".yaml", ".yml"):
        config = _load_module(base_file).get_config()
        _update(config, yaml.safe_load(path.read_text()), "", config)
    else:
        try:
            config = _load_module(path).get_config(name)
        except KeyError as error:
            raise ConfigError(f"{file}: {error.args[0]}") from error
    return config.lock()


def _load_module(path: Path):
    spec = importlib.util.spec_from_file_location("paco_grpo_run_config", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def apply_overrides(config: ConfigDict, overrides: Iterable[tuple[str, str]]) -> None:
    """Set each ``dotted.key`` to its value, converted to the option's type.

    Raises:
        ConfigError: Unknown key (names the nearest), or a value of the wrong type.
    """
    for key, text in overrides:
        node, field, path = _find(config, key)
        if _is_open(node):
            _set_open(node, field, text, key)
        elif isinstance(node[field], ConfigDict):
            _replace_table(node, field, text, key)
        else:
            _set(node, field, _convert(text, node.get_type(field), _nullable(node, field), path))


def _find(config: ConfigDict, key: str) -> tuple[ConfigDict, str, str]:
    node, parts, done = config, key.split("."), []
    while True:
        if _is_open(node):
            return node, ".".join(parts), key
        head = parts.pop(0)
        if head not in node:
            raise ConfigError(_unknown(config, key))
        done.append(head)
        if not parts:
            return node, head, key
        if not isinstance(node[head], ConfigDict):
            raise ConfigError(f"config.{'.'.join(done)} is a value, it has no field {'.'.join(parts)!r}")
        node = node[head]


def _unknown(config: ConfigDict, key: str) -> str:
    known = list(option_names(config))
    last = key.rsplit(".", 1)[-1]
    # The right name in the wrong group is likelier than another name.
    near = [k for k in known if k.rsplit(".", 1)[-1] == last] or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    meant = " or ".join(f"config.{k}" for k in near)
    hint = f" Did you mean {meant}?" if near else f" Known here: {', '.join(sorted(config.keys()))}"
    return f"unknown option config.{key}.{hint}"


def option_names(config: ConfigDict, prefix: str = "") -> Iterator[str]:
    """``dotted.key`` of every option; a table whose keys are the user's is one option."""
    for key, value in config.items():
        if isinstance(value, ConfigDict) and not _is_open(value):
            yield from option_names(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def _is_open(node: ConfigDict) -> bool:
    return node.allow_dotted_keys


def _nullable(node: ConfigDict, field: str) -> bool:
    return isinstance(dict(node.items(preserve_field_references=True))[field], FieldReference)


def _convert(text: str, kind: type, nullable: bool, key: str) -> Any:
    word = text.lower() if kind is str else text.strip().lower()  # a text of one space is a text (a negative prompt)
    if word in _NONE and kind is not str or nullable and word in (*_NONE, ""):
        if not nullable:
            raise ConfigError(f"config.{key} cannot be None")
        return None
    try:
        if kind is bool:
            lowered = text.strip().lower()
            if lowered not in _TRUE + _FALSE:
                raise ValueError
            return lowered in _TRUE
        if kind is tuple:
            value = ast.literal_eval(text.strip() or "()")
            value = tuple(value) if isinstance(value, tuple | list) else (value,)
            if any(type(entry) is not int for entry in value):
                raise ValueError
            return value
        return text if kind is object else kind(text)
    except (ValueError, SyntaxError) as error:
        raise ConfigError(f"config.{key}={text!r} is not {_article(kind)}") from error


def _article(kind: type) -> str:
    names = {tuple: "a list of integers such as 1,2", bool: "true or false", int: "an integer", float: "a number"}
    return names.get(kind, f"a {kind.__name__}")


def _set(node: ConfigDict, field: str, value: Any) -> None:
    with node.unlocked():
        node[field] = value


def _free_value(text: str) -> Any:
    """A value of a user's table: Python or YAML literal, else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return yaml.safe_load(text)


def _replace_table(node: ConfigDict, field: str, text: str, key: str) -> None:
    if not _is_open(node[field]):
        raise ConfigError(f"config.{key} is a group of options; set one of them: {', '.join(node[field].keys())}")
    value = _free_value(text) if text.strip() else {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.{key}={text!r} is not a table such as {{'jpeg_compressibility': 1.0}}")
    _set(node, field, ConfigDict(dict(value), allow_dotted_keys=True))


def _set_open(node: ConfigDict, field: str, text: str, key: str) -> None:
    value = _free_value(text)
    nested = key.split(".")[1].endswith("_kwargs") and not key.split(".")[1].startswith("aggregate")
    if nested and not isinstance(value, Mapping):
        # reward_fn_kwargs.NAME.keyword: the name itself may hold dots, a keyword cannot.
        name, dot, keyword = field.rpartition(".")
        if not dot:
            raise ConfigError(f"config.{key}: write config.{key}.KEYWORD=value")
        table = dict(node[name].to_dict()) if name in node else {}
        table[keyword] = value
        field, value = name, table
    if isinstance(value, Mapping):
        value = ConfigDict(dict(value), allow_dotted_keys=True)
    with node.unlocked(), node.ignore_type():
        node[field] = value


def _update(config: ConfigDict, values: Mapping[str, Any], prefix: str, root: ConfigDict) -> None:
    for key, value in values.items():
        if key not in config:
            raise ConfigError(_unknown(root, prefix + str(key)))
        if isinstance(config[key], ConfigDict):
            if _is_open(config[key]):
                _set(config, key, ConfigDict(dict(value or {}), allow_dotted_keys=True))
            else:
                _update(config[key], value, f"{prefix}{key}.", root)
            continue
        kind = config.get_type(key)
        value = tuple(value) if isinstance(value, list) else value
        value = float(value) if kind is float and isinstance(value, int) and not isinstance(value, bool) else value
        if value is None and not _nullable(config, key):
            raise ConfigError(f"config.{prefix}{key} cannot be None")
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"config.{prefix}{key}={value!r} is not {_article(kind)}")
        _set(config, key, value)


def config_to_yaml(config: ConfigDict) -> str:
    """The whole configuration as YAML that ``load_config`` reads back to the same values."""
    return yaml.safe_dump(_plain(config.to_dict()), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if callable(value):  # a function given in a configuration file; found again if it can be imported
        return f"{value.__module__}:{getattr(value, '__qualname__', type(value).__qualname__)}"
    return [_plain(entry) for entry in value] if isinstance(value, tuple | list) else value
