"""A training configuration: a YAML file and key=value arguments, as LLaMA-Factory merges them."""

import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pydantic
import torch
import yaml
from pydantic import Field, PositiveInt

from paco_judge.errors import UserError, first_problem

OTHER_LOSSES = ("use_dft_loss", "use_asft_loss", "use_eaft_loss", "use_mca", "use_hyper_parallel")
BASE = "base"  # key of a file whose other keys replace those of the file that it names
_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}

logger = logging.getLogger(__name__)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a YAML file of LLaMA-Factory arguments and apply "key=value" overrides.

    The values of overrides are YAML. ``base: FILE`` in the file names another one, relative to it,
    for the keys that it lacks. Where YAML and an option disagree on the type of a word, the option
    decides: ``eval_strategy: no`` is a text, ``max_samples: 1e4`` a whole number.

    Raises:
        UserError: A file or an override cannot be read, or a value is of a wrong type.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for override in overrides:
        if "=" not in override:
            raise UserError(f"{override!r} is not key=value; write for example learning_rate=1e-4")
    try:
        config, texts = _load_file(Path(path))
        config = OmegaConf.merge(config, OmegaConf.from_cli(list(overrides)))
        values = OmegaConf.to_container(config, resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, TypeError, ValueError) as error:
        raise UserError(f"configuration {path} cannot be read: {error}") from error
    texts |= dict(override.split("=", 1) for override in overrides)
    types = _option_types()
    for name in values.keys() & types.keys():
        values[name] = _typed(name, values[name], texts.get(name), types[name])
    return values


def _load_file(path: Path) -> tuple[Any, dict[str, Any]]:
    """The options of a file, and the same as they are written."""
    from omegaconf import OmegaConf

    config = OmegaConf.load(path)
    texts = yaml.load(path.read_bytes(), yaml.BaseLoader) or {}
    base = config.pop(BASE, None)
    if base is None:
        return config, texts
    base_config, base_texts = _load_file(path.parent / base)
    return OmegaConf.merge(base_config, config), base_texts | texts


def _option_types() -> dict[str, set[type]]:
    """What each option takes of bool, int, float and str."""
    from llamafactory.hparams import parser

    types = {}
    for options in (*parser._TRAIN_ARGS, _Options):
        for name, hint in get_type_hints(options).items():
            types[name] = _scalar_types(hint)
    return types


def _scalar_types(hint: Any) -> set[type]:
    if get_origin(hint) is Literal:
        return {type(value) for value in get_args(hint)}
    if get_args(hint):
        return set().union(*map(_scalar_types, get_args(hint)))
    if hint is bool or not isinstance(hint, type):
        return {hint} & {bool}
    return {kind for kind in (int, float, str) if issubclass(hint, kind)}


def _typed(name: str, value: Any, text: Any, types: set[type]) -> Any:
    """The value of an option that takes ``types``; ``text`` is how it is written."""
    kind = type(value)
    if not types or kind not in _TYPE_NAMES:  # None, lists, and what takes them
        return value
    is_literal = isinstance(text, str) and "$" not in text  # else, interpolated
    if kind is int and is_literal and re.fullmatch(r"[-+]?0[0-7_]+", text):
        value = int(text)  # YAML 1.1: an octal number
    if kind in types or (kind is int and float in types):
        return value
    if kind is float and int in types and value.is_integer():
        return int(value)
    if str in types:  # YAML 1.1: no, off, 007 … are no texts
        return text if is_literal and text.lower() not in ("true", "false") else value
    expected = " or ".join(_TYPE_NAMES[kind] for kind in _TYPE_NAMES if kind in types)
    raise UserError(f"option {name}: expected {expected}, got {value!r}")


def with_accumulation(config: dict[str, Any], processes: int) -> dict[str, Any]:
    """The configuration with ``gradient_accumulation_steps`` in place of ``global_batch_size``.

    An explicit one is kept. Otherwise an optimizer step has as nearly ``global_batch_size``
    sequences as possible: processes (on all nodes) x per_device_train_batch_size x accumulation.
    """
    config = dict(config)
    global_batch = config.pop("global_batch_size", None)
    if global_batch is None:
        return config
    default = 8  # of transformers
    micro_batch = processes * (config.get("per_device_train_batch_size") or default)
    steps = config.get("gradient_accumulation_steps")
    if not steps:
        steps = max(math.ceil(global_batch / micro_batch - 0.5), 1)
    if steps * micro_batch != global_batch:
        logger.warning(
            "a step has %d sequences instead of global_batch_size: %d",
            steps * micro_batch,
            global_batch,
        )
    return config | {"gradient_accumulation_steps": steps}


class _Options(pydantic.BaseModel):
    """Options that this package reads itself, and whose values LLaMA-Factory would not check."""

    model_config = pydantic.ConfigDict(strict=True)

    model_name_or_path: str = Field(min_length=1)
    output_dir: str = Field(min_length=1)
    global_batch_size: PositiveInt | None = None
    per_device_train_batch_size: PositiveInt | None = None
    gradient_accumulation_steps: PositiveInt | None = None
    do_train: bool = False
    use_cpu: bool = False
    overwrite_output_dir: bool = False
    first_token_weight: float | None = Field(None, ge=0, le=1)
    first_token_scheme: Literal["sequence", "released"] = "sequence"
    first_token_accuracy: bool = False


def check_options(config: dict[str, Any]) -> None:
    """Let pydantic and LLaMA-Factory's parser read the options, before anything else is read.

    The overlay must be installed.

    Raises:
        UserError: An option is misspelt, missing, or has a value of another type.
    """
    from llamafactory.hparams import parser
    from transformers import HfArgumentParser

    try:
        _Options(**config)
    except pydantic.ValidationError as error:
        raise UserError(f"option {first_problem(error)}") from error

    class WithoutDevice(parser.TrainingArguments):
        """Takes no GPU and waits for no other process: only the training processes do."""

        device = torch.device("cpu")

    kinds = [
        WithoutDevice if kind is parser.TrainingArguments else kind for kind in parser._TRAIN_ARGS
    ]
    options = dict(config)
    options.pop("global_batch_size", None)  # ours alone
    options |= {"use_cpu": True, "deepspeed": None}
    try:
        HfArgumentParser(kinds).parse_dict(options)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"options of LLaMA-Factory: {error}") from error


def check_combinations(config: dict[str, Any]) -> None:
    """Refuse settings under which the first-token-weighted loss would be wrong."""
    if config.get("first_token_weight") is None:
        return
    if config.get("stage", "sft") != "sft":
        raise UserError("first_token_weight needs stage: sft")
    needed_values: dict[str, Any] = dict.fromkeys(OTHER_LOSSES, False)
    needed_values |= {
        "train_on_prompt": False,
        "enable_thinking": False,  # so that answers begin with Yes or No
        "label_smoothing_factor": 0,
    }
    for name, value in needed_values.items():
        if config.get(name):
            raise UserError(f"first_token_weight needs {name}: {value}")
    if config.get("average_tokens_across_devices") is False:
        raise UserError("first_token_weight needs average_tokens_across_devices: true")
    if config.get("packing"):
        if not config.get("neat_packing"):
            raise UserError(
                "first_token_weight with packing: true needs neat_packing: true too, so that no "
                "answer sees the other pairs of its row"
            )
        # LLaMA-Factory separates the pairs of a row in Qwen3.5's linear attention only under
        # flash attention.
        if config.get("template") == "qwen3_5" and config.get("flash_attn") != "fa2":
            raise UserError(
                "Qwen3.5 needs packing: false, or flash_attn: fa2: pairs of a row must not mix"
            )
