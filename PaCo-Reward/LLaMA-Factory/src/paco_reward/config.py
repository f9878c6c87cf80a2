"""A training configuration: a YAML file and key=value arguments, merged as LLaMA-Factory merges them."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paco_reward.errors import PacoRewardError
from paco_reward.loss import SCHEMES

OTHER_LOSSES = ("use_dft_loss", "use_asft_loss", "use_eaft_loss", "use_mca", "use_hyper_parallel")

logger = logging.getLogger(__name__)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a YAML file of LLaMA-Factory arguments and apply "key=value" overrides, whose values are YAML."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if wrong := [item for item in overrides if "=" not in item]:
        raise PacoRewardError(
            f"{wrong[0]!r} is not key=value; write for example learning_rate=1e-4"
        )
    try:
        config = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_cli(list(overrides)))
        return OmegaConf.to_container(config, resolve=True)
    except (YAMLError, OmegaConfBaseException, TypeError) as error:
        raise PacoRewardError(f"configuration {path} cannot be read: {error}") from error


def with_accumulation(config: dict[str, Any], processes: int) -> dict[str, Any]:
    """The configuration with ``gradient_accumulation_steps`` in place of ``global_batch_size``.

    An explicit one is kept. Otherwise the sequences of an optimizer step, processes (on all nodes) x
    per_device_train_batch_size x accumulation, are as near to ``global_batch_size`` as possible.
    """
    config = dict(config)
    if (wanted := config.pop("global_batch_size", None)) is None:
        return config
    at_once = processes * config.get(
        "per_device_train_batch_size", 8
    )  # 8: the default of transformers
    steps = config.get("gradient_accumulation_steps") or max(math.ceil(wanted / at_once - 0.5), 1)
    if steps * at_once != wanted:
        logger.warning(
            "a step has %d sequences instead of global_batch_size: %d", steps * at_once, wanted
        )
    return config | {"gradient_accumulation_steps": steps}


def check_combinations(config: dict[str, Any]) -> None:
    """Refuse settings under which the first-token-weighted loss would be wrong."""
    weight = config.get("first_token_weight")
    if weight is None:
        return
    scheme, packing = config.get("first_token_scheme", "sequence"), config.get("packing")
    # LLaMA-Factory separates the pairs of a row in Qwen3.5's linear attention under flash attention alone.
    mixed = packing and config.get("template") == "qwen3_5" and config.get("flash_attn") != "fa2"
    other_losses = [name for name in OTHER_LOSSES if config.get(name)]
    for wrong, message in (
        (not 0 <= weight <= 1, f"a value from 0 to 1, not {weight}"),
        (scheme not in SCHEMES, f"first_token_scheme: {' or '.join(SCHEMES)}, not {scheme}"),
        (config.get("stage", "sft") != "sft", "stage: sft"),
        (other_losses, f"{', '.join(other_losses)}: false"),
        (config.get("train_on_prompt"), "train_on_prompt: false"),
        (
            config.get("enable_thinking"),
            "enable_thinking: false, so that answers begin with Yes or No",
        ),
        (
            packing and not config.get("neat_packing"),
            "neat_packing: true too, so that no answer sees its row's other pairs",
        ),
        (mixed, "packing: false or flash_attn: fa2, so that pairs of a row do not mix in Qwen3.5"),
        (
            config.get("average_tokens_across_devices") is False,
            "average_tokens_across_devices: true",
        ),
        (config.get("label_smoothing_factor"), "label_smoothing_factor: 0"),
    ):
        if wrong:
            raise PacoRewardError(f"first_token_weight needs {message}")
