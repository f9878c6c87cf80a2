"""Configuration files, saved runs and the command line become ``RunOptions``.

A command line has the form of ml_collections flags: ``--config SOURCE --config.a.b=value``. Names
are taken apart here; pydantic reads the values (``schema``), and ``_read_value`` those of tables.
"""

import dataclasses
import difflib
import inspect
import re
import runpy
import typing
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml
from ml_collections import ConfigDict
from omegaconf import OmegaConf
from pydantic import TypeAdapter, ValidationError
from typing_extensions import override

from paco_grpo.names import did_you_mean, in_words, without_keys
from paco_grpo.options.schema import GROUPS, OPTIONS, SET_OPTIONS, RunOptions
from paco_judge.errors import UserError

_RUN_OPTIONS = TypeAdapter(RunOptions)
# Options that nobody means to be empty. config.dataset may be, beside config.datasets.
_PLACES = ("pretrained.model", "resume_from", "save_dir", "train.lora_path")
_WORDS = {"true": True, "false": False, "none": None, "null": None, "": None}
_NUMBER = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_MODULE = "paco_grpo_run_config"  # the name of a configuration file while it runs


class ConfigError(UserError):
    """A configuration that cannot be used; the message names the option."""


class _Config(ConfigDict):
    """A ``ConfigDict`` without checks of types, whose keys, such as import paths, may hold dots."""

    def __init__(self, entries: Mapping[str, Any] = {}) -> None:
        super().__init__(type_safe=False, allow_dotted_keys=True)
        self.update(entries)

    @override
    def __setitem__(self, key: str, value: Any) -> None:
        # A copy: test.reward_fn, set to train.reward_fn, gets rewards that are not trained.
        is_table = isinstance(value, dict | ConfigDict)
        super().__setitem__(key, _Config(value) if is_table else value)


def config_dict() -> ConfigDict:
    """All options with their defaults, for a configuration file to change."""
    return _Config(dataclasses.asdict(RunOptions()))


# --- the command line ----------------------------------------------------------------------------


def read_options(arguments: Sequence[str]) -> tuple[RunOptions, str]:
    """The options of ``--config SOURCE --config.key=value …``, and the name of the configuration.

    See ``load_options``. Raises ConfigError.
    """
    source = None
    overrides = []
    words = iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option == "--config":
            source = value if equals else next(words, None)
        elif equals and option.startswith("--config."):
            overrides.append((option.removeprefix("--config."), value))
        else:
            raise ConfigError(
                f"unknown argument {word!r}. "
                "Options are given as --config FILE[:NAME] and --config.a.b=value"
            )
    if source is None:
        raise ConfigError("no configuration given; start with --config config/grpo.py:NAME")
    return load_options(source, overrides), source.partition(":")[2] or Path(source).stem


def describe_options(options: RunOptions) -> str:
    """Two lines for each option: its value and its meaning."""
    options = public_options(options)
    lines = []
    for name, field in OPTIONS.items():
        lines.append(f"--config.{name}={attrgetter(name)(options)!r}\n    {field.description}")
    return "\n".join(lines)


# --- configuration files -------------------------------------------------------------------------


def load_options(source: str, overrides: Iterable[tuple[str, str]] = ()) -> RunOptions:
    """The options in a file.

    Args:
        source: ``FILE.py:NAME`` (see ``named_configuration``) or a ``config.yaml`` saved by an
            earlier run.
        overrides: Pairs of dotted name and text, as on the command line, of an option or of an
            entry of a table.

    Raises:
        ConfigError: There is no such configuration, or an option is unknown or has a wrong value.
    """
    file, _, name = str(source).partition(":")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"configuration file {path.absolute()} does not exist")
    try:
        if path.suffix.lower() == ".py":
            names = runpy.run_path(str(path), run_name=_MODULE)
            values = named_configuration(names, name).to_dict()
        else:
            values = _of_today(OmegaConf.to_container(OmegaConf.load(path)))
    # ConfigDict's for an unknown name; what the file imports; its text; sys.exit in it.
    except (AttributeError, ImportError, NameError, SyntaxError, SystemExit) as error:
        raise ConfigError(f"{path}: {in_words(error, str(path))}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {error}") from error
    return make_options(values, overrides)


def _of_today(saved: Any) -> Any:
    """What a run has saved, with the options of today's version."""
    sample = saved.get("sample") if isinstance(saved, dict) else None
    if isinstance(sample, dict) and "cps" in sample:  # before 0.7
        sample["transition"] = "cps" if sample.pop("cps") else "flow_sde"
    return saved


def named_configuration(names: Mapping[str, Any], name: str) -> ConfigDict:
    """The configuration that a file, which defines ``names``, calls ``name``.

    It is what the function ``name``, which the file defines or imports, returns. ``name`` may end
    in keys of the file's table ``SUFFIXES``, in any order; their functions then change the
    configuration, unless the file has a function for the name with that suffix.

    Raises:
        ConfigError: There is no such configuration.
    """
    functions = {}
    for key, value in names.items():
        is_function = inspect.isfunction(value) and value is not config_dict
        if is_function and not inspect.signature(value).parameters:
            functions[key] = value
    changes = names.get("SUFFIXES", {})
    base = name
    endings: list[str] = []
    while ending := max(filter(base.endswith, changes), key=len, default=""):
        base = base.removesuffix(ending)
        endings.insert(0, ending)
    suffixes = []
    for ending in endings:
        if base + ending in functions:
            base += ending
        else:
            suffixes.append(ending)
    if base in functions:
        config = functions[base]()
        if not isinstance(config, ConfigDict):
            raise ConfigError(f"{names['__file__']}: {base}() returns {config!r}: return config")
        for suffix in suffixes:
            changes[suffix](config)
        return config
    raise ConfigError(
        f"{names['__file__']} has no configuration {name!r}.{did_you_mean(name, functions)} "
        f"Known: {', '.join([*functions, *changes])}"
    )


# --- values --------------------------------------------------------------------------------------


def make_options(
    values: Mapping[str, Any], overrides: Iterable[tuple[str, str]] = ()
) -> RunOptions:
    """Options from nested values, or defaults; a ``ConfigError`` has a line for each problem."""
    values = _as_json(values)
    for name, text in overrides:
        _override(values, name, text)
    try:
        return _RUN_OPTIONS.validate_python(values)
    except ValidationError as error:
        problems = dict.fromkeys(map(_problem, error.errors()))
        raise ConfigError("\n".join(problems)) from error


def _as_json(value: Any) -> Any:
    """A copy in which tuples are lists."""
    if isinstance(value, dict):
        return {key: _as_json(entry) for key, entry in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _override(values: dict[str, Any], name: str, text: str) -> None:
    """Set the option, or the entry of a table, that the command line calls ``name``."""
    # A table is an option of a group or of a prompt set. A reward's name in it may be an import
    # path with dots, which the name of an argument may follow.
    depth = 3 if name.startswith("datasets.") else 2
    keys = name.split(".", depth)
    keys[depth:] = re.findall(r"(?:.*:)?[^.]+", ".".join(keys[depth:]))
    is_entry = name not in OPTIONS
    annotation = dict | None if is_entry else OPTIONS[name].annotation
    kinds = {typing.get_origin(annotation), *typing.get_args(annotation)}
    may_be_none = not kinds.isdisjoint({type(None), dict})
    value: Any = text  # which pydantic reads
    if not text and name in _PLACES:
        raise ConfigError(
            f"config.{name} is empty (is a variable unset?): leave it out, or name a place"
        )
    if may_be_none and text.lower() in ("none", "null", ""):
        value = None
    elif is_entry or text.startswith(("[", "{")):
        value = _read_value(text)
    for key in keys[:-1]:
        if not isinstance(values.get(key), dict):
            values[key] = {}
        values = values[key]
    values[keys[-1]] = value


def _read_value(text: str) -> Any:
    """A list or table in YAML's flow style, of which JSON is a part, a quoted text, or ``_plain``.

    What looks like a list and is none, such as a regular expression, is a text.
    """
    if not text.startswith(("[", "{", '"', "'")):
        return _plain(text)
    try:
        return yaml.load(text, _FlowLoader)
    except yaml.YAMLError:
        return text


def _plain(text: str) -> Any:
    """A number as JSON writes it, true, false, or None or null; anything else is a text.

    YAML 1.1 would read 007 as 7, 12:30 as 750, off as False and ~ as None.
    """
    word = text.strip()
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if not _NUMBER.fullmatch(word):
        return text
    return int(word) if word.removeprefix("-").isdecimal() else float(word)


class _FlowLoader(yaml.BaseLoader):
    """Reads scalars without quotes as ``_plain`` does."""

    @override
    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        return _plain(node.value) if node.style is None else node.value

    @override
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key, str) or key in mapping:
                raise yaml.YAMLError(f"the key {key!r} is no text, or stands twice")
            if value_node.value == "" and value_node.style is None:
                raise yaml.YAMLError(f"the key {key!r} has no value")  # "{n}" is a text
            mapping[key] = self.construct_object(value_node, deep=deep)
        return mapping


_RESUME = "use config.resume_from: latest, or the folder of a checkpoint"
_DERIVED = (
    "derived from config.sample.unique_sample_num_per_epoch (prompts) and "
    "config.sample.num_images_per_prompt (images of each)"
)

# Names of the published code's options that are others here.
PUBLISHED = {
    "logdir": "use config.save_dir",
    "run_id": "use config.run_name",
    "resume_from_id": _RESUME,
    "resume_from_step": _RESUME,
    "resume_from_epoch": _RESUME,
    "pretrained.revision": (
        "give config.pretrained.model a folder: "
        "hf download NAME --revision REVISION --local-dir FOLDER"
    ),
    "sample.num_batches_per_epoch": _DERIVED,
    "sample.sample_num_per_epoch": _DERIVED,
    "train.gradient_accumulation_steps": (
        "derived from config.train.gradient_step_per_epoch and config.train.batch_size"
    ),
    "sample.cps": "use config.sample.transition: flow_sde or cps",
    "train.param_noise_std": "not available; see config.sample.noise_level",
    "train.guidance_scale": "use config.sample.guidance_scale",
    "train.cfg": "use config.sample.negative_prompt (None: no true CFG)",
    "train.timestep_fraction": "use config.train.timesteps, which are step indices",
    "enable_flexible_size": "use config.item_size: exact or aspect",
    "prompt_fn_kwargs": "use config.prompt_fn: geneval_image or arrow_editing",
    "test.aggregate_fn": "not needed: an evaluation reports each reward",
}


def _problem(error: Mapping[str, Any]) -> str:
    """One line on an error of pydantic, with the option that it is about."""
    name = ".".join(map(str, error["loc"]))
    if error["type"] != "unexpected_keyword_argument":
        if name.startswith("train.aggregate_fn"):
            name = "train.aggregate_fn"  # without pydantic's names of what it may be
        return f"config.{name}={error['input']!r}: {error['msg']}"
    if name in PUBLISHED:
        return f"config.{name} is an option of the published code. Here: {PUBLISHED[name]}"
    known = [*OPTIONS, *GROUPS, *SET_OPTIONS]
    last_words = [option.rpartition(".")[2] for option in known]
    nearest = difflib.get_close_matches(name.rpartition(".")[2], last_words, n=1)
    meant = []
    for option, last_word in zip(known, last_words, strict=True):
        if last_word in nearest:
            meant.append(f"config.{option}")
    hint = f"Did you mean {' or '.join(meant)}?" if meant else "docs/configuration.md has all"
    return f"unknown option config.{name}. {hint}"


# --- saving --------------------------------------------------------------------------------------


def options_to_dict(options: RunOptions) -> dict[str, Any]:
    """Nested plain values, from which ``make_options`` makes equal options.

    Keys of servers (``api_key``) are left out.

    Of ``train.aggregate_fn``, only its description can be saved
    (``advantages.aggregation.describe``), not a function.
    """
    return without_keys(_RUN_OPTIONS.dump_python(options, mode="json"))


def public_options(options: RunOptions) -> RunOptions:
    """The options without keys of servers: what a file or the log may show."""
    return make_options(options_to_dict(options))


def options_to_yaml(options: RunOptions) -> str:
    """The text of a run's config.yaml."""
    return OmegaConf.to_yaml(OmegaConf.create(options_to_dict(options)), sort_keys=True)
