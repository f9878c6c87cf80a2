"""A training configuration: a YAML file and key=value arguments, as LLaMA-Factory merges them."""

import difflib
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paco_reward.errors import PacoRewardError
from paco_reward.loss import SCHEMES

OTHER_LOSSES = ("use_dft_loss", "use_asft_loss", "use_eaft_loss", "use_mca", "use_hyper_parallel")
BASE = "base"  # key of a file whose other keys replace those of the file that it names

logger = logging.getLogger(__name__)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a YAML file of LLaMA-Factory arguments and apply "key=value" overrides.

    The values of overrides are YAML. ``base: FILE`` in the file names another one, relative to it,
    for the keys that it lacks.

    Raises:
        PacoRewardError: A file or an override cannot be read.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    for override in overrides:
        if "=" not in override:
            raise PacoRewardError(
                f"{override!r} is not key=value; write for example learning_rate=1e-4"
            )
    try:
        config = OmegaConf.merge(_load_file(Path(path)), OmegaConf.from_cli(list(overrides)))
        return OmegaConf.to_container(config, resolve=True)
    except RecursionError as error:
        raise PacoRewardError(f"configuration {path} is its own {BASE}") from error
    except (YAMLError, OmegaConfBaseException, TypeError, ValueError) as error:
        raise PacoRewardError(f"configuration {path} cannot be read: {error}") from error


def _load_file(path: Path) -> Any:
    from omegaconf import DictConfig, OmegaConf

    config = OmegaConf.load(path)
    if not isinstance(config, DictConfig):
        raise PacoRewardError(f"configuration {path} has no key: value lines")
    base = config.pop(BASE, None)
    return config if base is None else OmegaConf.merge(_load_file(path.parent / base), config)


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


def check_types(config: dict[str, Any]) -> None:
    """Refuse missing options, and those that we read with a value of another type."""
    for key in ("model_name_or_path", "output_dir"):
        if not isinstance(config.get(key), str) or not config[key]:
            raise PacoRewardError(f"{key} is missing: add it to the configuration, or {key}=…")
    for key in ("dataset_dir", "media_dir", "template"):
        value = config.get(key)
        if value is not None and not isinstance(value, str):
            raise PacoRewardError(f"{key} must be a text, not {value!r}")
    for key in ("global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"):
        value = config.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise PacoRewardError(f"{key} must be a whole number from 1, not {value!r}")
    for key in ("do_train", "use_cpu", "overwrite_output_dir", "first_token_accuracy"):
        if not isinstance(config.get(key, False), bool):
            raise PacoRewardError(f"{key} must be true or false, not {config[key]!r}")
    for key in ("dataset", "eval_dataset"):
        names = config.get(key) or []
        texts = names if isinstance(names, list) else [names]
        if not all(isinstance(name, str) for name in texts):
            raise PacoRewardError(f"{key} must hold names of data sets, not {names!r}")
    weight = config.get("first_token_weight")
    if weight is not None:
        is_number = type(weight) in (int, float)
        if not is_number or not 0 <= weight <= 1:
            raise PacoRewardError(
                f"first_token_weight must be a number from 0 to 1, or null, not {weight!r}"
            )
    scheme = config.get("first_token_scheme", "sequence")
    if scheme not in SCHEMES:
        raise PacoRewardError(f"first_token_scheme must be {' or '.join(SCHEMES)}, not {scheme!r}")


def check_names(config: dict[str, Any]) -> None:
    """Refuse a key that neither LLaMA-Factory nor this package has, naming the nearest one."""
    from llamafactory.hparams import parser

    known = {"global_batch_size"}
    for arguments in parser._TRAIN_ARGS:
        known |= set(arguments.__dataclass_fields__)
    for key in config:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f"; do you mean {nearest[0]}?" if nearest else ""
            raise PacoRewardError(f"there is no option {key}{hint}")


def check_combinations(config: dict[str, Any]) -> None:
    """Refuse settings under which the first-token-weighted loss would be wrong."""
    if config.get("first_token_weight") is None:
        return
    if config.get("stage", "sft") != "sft":
        raise PacoRewardError("first_token_weight needs stage: sft")
    for name in OTHER_LOSSES:
        if config.get(name):
            raise PacoRewardError(f"first_token_weight needs {name}: false, which is another loss")
    if config.get("train_on_prompt"):
        raise PacoRewardError("first_token_weight needs train_on_prompt: false")
    if config.get("enable_thinking"):
        raise PacoRewardError(
            "first_token_weight needs enable_thinking: false, so that answers begin with Yes or No"
        )
    if config.get("packing"):
        if not config.get("neat_packing"):
            raise PacoRewardError(
                "first_token_weight with packing: true needs neat_packing: true too, so that no "
                "answer sees the other pairs of its row"
            )
        # LLaMA-Factory separates the pairs of a row in Qwen3.5's linear attention only under
        # flash attention.
        if config.get("template") == "qwen3_5" and config.get("flash_attn") != "fa2":
            raise PacoRewardError(
                "Qwen3.5 needs packing: false, or flash_attn: fa2: pairs of a row must not mix"
            )
    if config.get("average_tokens_across_devices") is False:
        raise PacoRewardError("first_token_weight needs average_tokens_across_devices: true")
    if config.get("label_smoothing_factor"):
        raise PacoRewardError("first_token_weight needs label_smoothing_factor: 0")
