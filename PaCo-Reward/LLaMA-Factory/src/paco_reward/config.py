"""A training configuration: a YAML file and key=value arguments, merged as LLaMA-Factory merges them."""

import difflib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from paco_reward.errors import PacoRewardError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a YAML file of LLaMA-Factory arguments and apply "key=value" overrides, whose values are YAML.

    Raises:
        PacoRewardError: A missing file, invalid YAML, or an override that is not key=value.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    path = Path(path)
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path("config")
        known = ", ".join(sorted(str(p) for p in folder.glob("*.yaml"))) or "none here"
        raise PacoRewardError(f"configuration {path} does not exist; configurations: {known}")
    wrong = [item for item in overrides if "=" not in item]
    if wrong:
        raise PacoRewardError(f"{wrong[0]!r} is not key=value; write for example learning_rate=1e-4")
    try:
        config = OmegaConf.load(path)
        if not isinstance(config, DictConfig):
            raise PacoRewardError(f"configuration {path} must hold key: value lines, not a list")
        return OmegaConf.to_container(OmegaConf.merge(config, OmegaConf.from_cli(list(overrides))), resolve=True)
    except (YAMLError, OmegaConfBaseException) as error:
        raise PacoRewardError(f"configuration {path} cannot be read: {' '.join(str(error).split())}") from error


def check_keys(config: dict[str, Any], dataclasses: list[type]) -> None:
    """Refuse a key that is no field of the argument dataclasses, and suggest the nearest one."""
    known = {item.name for cls in dataclasses for item in fields(cls) if item.init}
    for key in config:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise PacoRewardError(f"unknown configuration key {key!r}{hint}")


def check_combinations(config: dict[str, Any]) -> None:
    """Refuse settings under which the first-token-weighted loss would be wrong."""
    if config.get("first_token_weight") is None:
        return
    if config.get("train_on_prompt"):
        raise PacoRewardError("first_token_weight needs train_on_prompt: false to find the answer's first token")
    if config.get("packing") and not config.get("neat_packing"):
        raise PacoRewardError(
            "first_token_weight needs neat_packing: true instead of packing: true; packed plainly, an answer would see "
            "the other pairs of its row"
        )
    if config.get("average_tokens_across_devices") is False:
        raise PacoRewardError("first_token_weight needs average_tokens_across_devices: true (the default)")
