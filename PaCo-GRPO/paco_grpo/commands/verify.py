"""The work of ``scripts/evaluate.py --verify``: a checkpoint in plain diffusers and here."""

from pathlib import Path

import torch

from paco_grpo.data.prompts import load_prompts
from paco_grpo.evaluation.verify import Verification, skip_reason
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.policies.adapters import add_lora
from paco_grpo.training.build import apply_speed, load_generator
from paco_grpo.training.checks import check_items, with_text_length
from paco_grpo.training.verification import verify_checkpoint


def verify(options: RunOptions, place: str) -> Verification:
    """Compare ``diffusers/`` of the checkpoint ``place`` with its ``adapter/``.

    On the first test prompt.
    """
    checkpoint = Path(place).expanduser()
    for name in ("adapter", "diffusers"):
        if not (checkpoint / name).is_dir():
            raise ConfigError(
                f"--verify {place}: there is no {checkpoint / name}; give a checkpoint, such as "
                "runs/NAME/checkpoints/epoch_0100"
            )
    if reason := skip_reason(options):
        raise ConfigError(f"--verify {place} cannot compare: {reason}")
    items = load_prompts(options.dataset, "test", options.prompt_fn)
    check_items(options, {"test": items})
    options = with_text_length(options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = load_generator(options, device)
    add_lora(policy, lora_path=checkpoint / "adapter", option="--verify")
    apply_speed(options, policy)
    return verify_checkpoint(policy, options, checkpoint, items[0])
