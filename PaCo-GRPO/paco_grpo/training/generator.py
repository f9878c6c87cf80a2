"""The generator that a configuration names, with or without an adapter."""

from __future__ import annotations

from pathlib import Path

import torch
from ml_collections import ConfigDict

from paco_grpo.policies import Policy, PolicyLoadError, load_policy
from paco_grpo.policies.adapters import add_lora


def load_generator(config: ConfigDict, device: torch.device | str) -> Policy:
    """``config.pretrained.model`` in the precision and with the guidance of ``config``.

    Raises:
        PolicyLoadError: It cannot be loaded.
    """
    return load_policy(
        config.pretrained.model,
        dtype=torch.bfloat16 if config.mixed_precision == "bf16" else torch.float32,
        device=device,
        max_sequence_length=config.max_sequence_length,
        guidance_scale=config.sample.guidance_scale,
        negative_prompt=config.sample.negative_prompt,
        quantize=config.pretrained.quantize,
    )


def load_adapter(policy: Policy, place: str) -> None:
    """Put the adapter at ``place`` on ``policy``.

    Args:
        policy: The base model.
        place: A checkpoint of ours, a folder in PEFT or diffusers format, or a hub name.

    Raises:
        PolicyLoadError: It is none of these, or belongs to another model.
    """
    folder = Path(place).expanduser()
    if (folder / "transformer").is_dir() and not (folder / "adapter").is_dir():
        raise PolicyLoadError(
            f"--adapter {place} is a checkpoint of a run without LoRA: its whole transformer was trained; put "
            "transformer/ in place of the base model's and leave out --adapter"
        )
    add_lora(policy, lora_path=folder / "adapter" if (folder / "adapter").is_dir() else place)
