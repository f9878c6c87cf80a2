"""After a run: the saved adapter in plain diffusers. Log and model card say how it compares."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from paco_grpo.checkpoint import files
from paco_grpo.checkpoint.model_card import add_check
from paco_grpo.evaluation.verify import Verification, skip_reason, verify_adapter
from paco_grpo.options import RunOptions
from paco_grpo.policies.base import Policy
from paco_grpo.types import Item

if TYPE_CHECKING:
    from paco_grpo.training.build import Run

logger = logging.getLogger(__name__)


def verify_checkpoint(
    policy: Policy, options: RunOptions, checkpoint: Path, item: Item
) -> Verification:
    """Compare ``diffusers/`` of ``checkpoint`` with ``policy``, which has the saved weights."""
    folder = checkpoint / "diffusers"
    verification = verify_adapter(policy, options, folder, item)
    logger.log(logging.INFO if verification.passed else logging.WARNING, "%s", verification)
    add_check(folder, str(verification))
    return verification


def verify_run(run: Run) -> None:
    """Compare the last checkpoint with the averaged weights, where that can be done.

    A problem is a warning, because the run is finished and saved.
    """
    if run.accelerator.is_main_process:
        checkpoint = run.checkpoints.root / files.checkpoint_name(run.state.epoch)
        with run.state.averaged():
            _verify_or_warn(run.state.policy, run.options, checkpoint, run.test_items[0])
    run.accelerator.wait_for_everyone()


def _verify_or_warn(policy: Policy, options: RunOptions, checkpoint: Path, item: Item) -> None:
    if reason := skip_reason(options):
        logger.info("the checkpoint is not compared with plain diffusers: %s", reason)
        return
    try:
        verify_checkpoint(policy, options, checkpoint, item)
    except Exception as error:  # noqa: BLE001 - pipelines raise anything
        logger.warning(
            "the saved adapter could not be compared with plain diffusers (%s: %s)",
            type(error).__name__,
            error,
        )
