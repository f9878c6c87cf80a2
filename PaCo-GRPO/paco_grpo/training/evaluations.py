"""The evaluations of a run, and the comparison of its adapter with plain diffusers."""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from paco_grpo.checkpoint import files
from paco_grpo.checkpoint.model_card import add_check
from paco_grpo.distributed.processes import Stopped, main_decides
from paco_grpo.evaluation.evaluate import Evaluation
from paco_grpo.evaluation.folder import log_pictures
from paco_grpo.evaluation.verify import Verification, skip_reason, verify_adapter
from paco_grpo.monitoring import health
from paco_grpo.monitoring.console import rewards_line
from paco_grpo.options import RunOptions
from paco_grpo.policies.base import Policy
from paco_grpo.rewards.registry import reward_weights
from paco_grpo.training.build import Run
from paco_grpo.training.state import merges_lora
from paco_grpo.training.stopping import require_scores
from paco_grpo.types import Item

logger = logging.getLogger(__name__)


class Evaluations:
    """Evaluates the averaged weights of ``run``; ``is_signaled`` is asked whether to stop."""

    def __init__(self, run: Run, is_signaled: Callable[[], bool]) -> None:
        self.run = run
        self.is_signaled = is_signaled

    def evaluate_if_due(self, finished: bool = False) -> None:
        """Evaluate every ``config.eval_freq`` epochs and when training has ``finished``."""
        epoch = self.run.state.epoch
        frequency = self.run.options.eval_freq
        if not finished and (frequency == 0 or epoch % frequency):
            return
        evaluated = main_decides(
            self.run.accelerator, lambda: [row["epoch"] for row in self.run.metrics.rows("eval")]
        )
        if epoch in evaluated:
            return  # before the run was resumed
        metrics = self._evaluate(epoch)
        self.run.log("eval", metrics)
        self._report(epoch, metrics)

    def _folder(self, epoch: int) -> Path:
        return self.run.folder / "eval" / files.checkpoint_name(epoch)

    def _evaluate(self, epoch: int) -> dict[str, float]:
        """Evaluate the averaged weights, or stop the run here if too few images have scores."""
        run = self.run
        options = run.options
        started = time.perf_counter()
        run.seed_generators()
        with run.state.averaged():
            policy = run.state.policy
            evaluation = Evaluation(
                policy,
                run.test_items,
                run.rewards.test,
                options,
                run.state.strategy,
                merges_lora(options, policy.device),
            )
            metrics = evaluation.run(self._folder(epoch), self.is_signaled)
        if metrics is None:
            raise Stopped
        metrics["time/eval_s"] = time.perf_counter() - started
        # As in training, rewards with weight 0 are only monitored.
        for prompt_set in run.prompt_sets:
            weights = reward_weights(prompt_set.test.weights)
            shares = {
                name: metrics.get(f"{prompt_set.metrics}{name}_missing", 0.0)
                for name in weights
                if weights[name]
            }
            share = max(shares.values(), default=0.0)
            of_name = f" of {prompt_set.name}" if prompt_set.name else ""
            images = f"the images{of_name} in the evaluation after epoch {epoch}"
            require_scores(share, shares, images, options.train)
        return metrics

    def _report(self, epoch: int, metrics: Mapping[str, float]) -> None:
        run = self.run
        if run.accelerator.is_main_process:
            rows = run.metrics.rows("eval")
            for prompt_set, of_set in zip(run.prompt_sets, run.set_rewards, strict=True):
                group = prompt_set.metrics
                for finding in health.judge_evaluation(rows, of_set.weights, group):
                    logger.warning("%s (%s in metrics.jsonl)", finding.message, finding.sign)
            log_pictures(run.tracker, self._folder(epoch), epoch)
        logger.info(
            "evaluation after epoch %d: %d images, %s",
            epoch,
            metrics["eval/num_images"],
            rewards_line(metrics, "eval/"),
        )
        for prompt_set in run.prompt_sets:
            if prompt_set.name:
                line = rewards_line(metrics, prompt_set.metrics)
                logger.info("  %s: %s", prompt_set.name, line)


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
