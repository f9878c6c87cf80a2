"""Configuration files, saved runs and the command line become ``RunOptions``.

A command line has the form of ml_collections flags: ``--config SOURCE --config.a.b=value``. Names
are taken apart here; pydantic reads the values (``schema``), and OmegaConf those of tables.
"""

import dataclasses
import difflib
import inspect
import logging
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

from paco_grpo.names import did_you_mean
from paco_grpo.options.schema import GROUPS, OPTIONS, SET_OPTIONS, RunOptions
from paco_judge.errors import UserError

logger = logging.getLogger(__name__)

_RUN_OPTIONS = TypeAdapter(RunOptions)
_MODULE = "paco_grpo_run_config"  # the name of a configuration file while it runs


class ConfigError(UserError):
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


def parse_command_line(arguments: Iterable[str]) -> tuple[str, list[tuple[str, str]]]:
    """Split ``--config SOURCE --config.key=value …`` into the source and the overrides."""
    source = None
    overrides = []
    rest = iter(arguments)
    for argument in rest:
        option, equals, value = argument.partition("=")
        words = re.fullmatch(r"--?(no)?config(\..+)?", option)
        if words is None:
            raise ConfigError(
                f"unknown argument {argument!r}. "
                "Options are given as --config FILE[:NAME] and --config.a.b=value"
            )
        if words[1]:
            value = "false"
        elif not equals:
            value = next(rest, "--")
            if value.startswith("--"):
                raise ConfigError(f"argument {argument!r} has no value; write {argument}=VALUE")
        if words[2]:
            overrides.append((words[2][1:], value))
        else:
            source = value
    if source is None:
        raise ConfigError("no configuration given; start with --config config/grpo.py:NAME")
    return source, overrides


def describe_options(options: RunOptions) -> str:
    """Two lines for each option: its value and its meaning."""
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
    """
    file, _, name = str(source).partition(":")
    path = Path(file)
    if path.suffix not in (".py", ".yaml", ".yml"):
        raise ConfigError(f"configuration {file!r} is not a .py or .yaml file")
    if not path.is_file():
        raise ConfigError(f"configuration file {path.absolute()} does not exist")
    try:
        if path.suffix == ".py":
            config = named_configuration(runpy.run_path(str(path), run_name=_MODULE), name)
            values = config.to_dict()
        else:
            values = OmegaConf.to_container(OmegaConf.load(path))
            if not isinstance(values, dict):
                raise ConfigError(f"{path} holds no table of options")
    # ConfigDict's for an unknown name; what the file imports; its text.
    except (AttributeError, ImportError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return make_options(values, overrides)


def named_configuration(names: Mapping[str, Any], name: str) -> ConfigDict:
    """The configuration that a file, which defines ``names``, calls ``name``.

    It is what the public function ``name``, which the file defines or imports, returns. ``name``
    may end in keys of the file's table ``SUFFIXES``, in any order; their functions then change the
    configuration, unless the file has a function for the name with that suffix. A file may instead
    have a function ``get_config``, which gets ``name``, or nothing where no name is given.

    Raises:
        ConfigError: There is no such configuration.
    """
    functions = {}
    for key, value in names.items():
        if not inspect.isfunction(value) or value.__module__.startswith("paco_grpo."):
            continue
        if key[0] != "_" and not inspect.signature(value).parameters:
            functions[key] = value
    get_config = names.get("get_config")
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
        for suffix in suffixes:
            changes[suffix](config)
        return config
    if get_config:
        return get_config(name) if name else get_config()
    also = f"also with {', '.join(changes)}" if changes else "for _nft and such, import SUFFIXES"
    raise ConfigError(
        f"{names['__file__']} has no configuration {name!r}.{did_you_mean(name, functions)} "
        f"Known: {', '.join(sorted(functions)) or 'none'} ({also})"
    )


# --- values --------------------------------------------------------------------------------------


def make_options(
    values: Mapping[str, Any], overrides: Iterable[tuple[str, str]] = ()
) -> RunOptions:
    """Options from nested values, or defaults; a ``ConfigError`` has a line for each problem.

    A file's arguments of rewards that ``overrides`` replace are dropped, and its evaluation follows
    the rewards that they train.
    """
    values = _as_json(values)
    overrides = list(overrides)
    before = _as_json(values)
    for name, text in overrides:
        _override(values, name, text)
    if not any(name.startswith("test.reward_fn") for name, _ in overrides):
        _evaluate_what_is_trained(before, values)
    _drop_arguments(before, values)
    try:
        return _RUN_OPTIONS.validate_python(values)
    except ValidationError as error:
        problems = dict.fromkeys(_problem(detail) for detail in error.errors())
        raise ConfigError("\n".join(problems)) from error


def _as_json(value: Any) -> Any:
    """A copy in which tuples are lists."""
    if isinstance(value, dict):
        return {key: _as_json(entry) for key, entry in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _evaluate_what_is_trained(before: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Evaluate rewards that the command line adds, and none of a task that it replaces."""
    tested = _table(values, "test", "reward_fn")
    trained = _table(values, "train", "reward_fn")
    earlier = _table(before, "train", "reward_fn")
    kept = [name for name, weight in earlier.items() if weight and name in trained]
    if kept and tested:
        tested |= {name: trained[name] for name in trained if name not in earlier}
    elif tested and any(earlier.values()):
        tested.clear()
        logger.info("config.test.reward_fn is replaced: the trained rewards are evaluated")


def _drop_arguments(before: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Drop the arguments of rewards that are no longer there."""
    for reward in _rewards(before) - _rewards(values):
        for split in ("train", "test"):
            arguments = _table(values, split, "reward_fn_kwargs")
            if arguments.pop(reward, None) is not None:
                logger.info(
                    "config.%s.reward_fn_kwargs.%s is dropped: its reward is gone", split, reward
                )


def _rewards(values: Mapping[str, Any]) -> set[str]:
    """The names of the rewards of training and of evaluation, also those of prompt sets."""
    names = {*_table(values, "train", "reward_fn"), *_table(values, "test", "reward_fn")}
    sets = values.get("datasets")
    for of_set in sets if isinstance(sets, dict) else {}:
        names.update(_table(sets, of_set, "reward_fn"), _table(sets, of_set, "test_reward_fn"))
    return names


def _table(values: Mapping[str, Any], group: str, name: str) -> dict[str, Any]:
    """A table of options; empty where there is none, which pydantic will say."""
    options = values.get(group)
    table = options.get(name) if isinstance(options, dict) else None
    return table if isinstance(table, dict) else {}


def _override(values: dict[str, Any], name: str, text: str) -> None:
    """Set the option, or the entry of a table, that the command line calls ``name``."""
    depth = 2 if name.partition(".")[0] in GROUPS else 1
    keys = name.split(".", depth)
    option = ".".join(keys[:depth])
    if option not in OPTIONS:
        values[name] = text  # pydantic refuses it, with all other problems
        return
    annotation = OPTIONS[option].annotation if name == option else dict
    if type(None) in typing.get_args(annotation) and text.lower() in ("none", "null", ""):
        value = None
    elif dict in (annotation, typing.get_origin(annotation)) or text[:1] in ("[", "{"):
        value = _read_yaml(name, text)
    else:
        value = text  # which pydantic reads
    if option == "datasets":
        keys = name.split(".", 3)  # datasets, set, its option, entry of that
        option = keys[2] if len(keys) > 3 else option
    if option.endswith("reward_fn_kwargs") and name != option:
        # A reward's name may be an import path with dots; an argument's name follows it.
        reward, argument = re.fullmatch(r"((?:.*:)?[^.]*)\.?(.*)", keys.pop()).groups()
        keys += [reward, argument] if argument else [reward]
    for key in keys[:-1]:
        if not isinstance(values.get(key), dict):
            values[key] = {}
        values = values[key]
    values[keys[-1]] = value


def _read_yaml(name: str, text: str) -> Any:
    """A value in YAML, of which JSON is a part, or the text itself where it is none."""
    if text == "None":
        return None
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]
    except yaml.constructor.ConstructorError as error:
        raise ConfigError(f"config.{name}: {error}") from error
    except yaml.YAMLError:
        return text


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
    words = [str(word) for word in error["loc"]]
    name = ".".join(words)
    if error["type"] == "unexpected_keyword_argument":
        return _unknown(name)
    if "reward_fn" not in name:  # else entries of a table; here, alternatives of a union
        depths = dict.fromkeys(GROUPS, 2) | {"datasets": 3}
        name = ".".join(words[: depths.get(words[0], 1)])
    message = error["msg"].removeprefix("Value error, ")
    return f"config.{name}={error['input']!r}: {message}"


def _unknown(name: str) -> str:
    if name in PUBLISHED:
        return f"config.{name} is an option of the published code. Here: {PUBLISHED[name]}"
    group, _, field = name.rpartition(".")
    if group.startswith("datasets."):
        hint = did_you_mean(field, SET_OPTIONS)
        return f"unknown option config.{name}.{hint} Known: {', '.join(SET_OPTIONS)}"
    nearest = [option for option in OPTIONS if option.rpartition(".")[2] == field]
    nearest = nearest or difflib.get_close_matches(name, OPTIONS, cutoff=0.7)
    hint = " or ".join(f"config.{option}" for option in nearest)
    if hint:
        return f"unknown option config.{name}. Did you mean {hint}?"
    return f"unknown option config.{name}; docs/configuration.md has all"


# --- saving --------------------------------------------------------------------------------------


def options_to_dict(options: RunOptions) -> dict[str, Any]:
    """Nested plain values, from which ``make_options`` makes equal options.

    Of ``train.aggregate_fn``, only its description can be saved
    (``advantages.aggregation.describe``), not a function.
    """
    values = _RUN_OPTIONS.dump_python(options, mode="json")
    if not options.datasets:
        del values["datasets"]  # a run with one prompt set is saved as ever
    return values


def options_to_yaml(options: RunOptions) -> str:
    """The text of a run's config.yaml."""
    return OmegaConf.to_yaml(OmegaConf.create(options_to_dict(options)), sort_keys=True)
