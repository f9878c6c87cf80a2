"""The evaluations of a run."""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from paco_grpo.distributed import Stopped, main_decides, same_outcome
from paco_grpo.evaluation.evaluate import Evaluation
from paco_grpo.monitoring import signs
from paco_grpo.monitoring.metrics import rewards_line
from paco_grpo.monitoring.trackers import Tracker
from paco_grpo.rewards.registry import reward_weights
from paco_grpo.training import checkpoints
from paco_grpo.training.best import BEST_EPOCH, BestEvaluation
from paco_grpo.training.run import Run
from paco_grpo.training.state import merges_lora
from paco_grpo.training.stopping import require_scores
from paco_judge.files import read_json_lines
from paco_judge.images import read_image

logger = logging.getLogger(__name__)

_TRACKED_IMAGES = 8


class Evaluations:
    """Evaluates the averaged weights of ``run``; ``is_signaled`` is asked whether to stop."""

    def __init__(self, run: Run, is_signaled: Callable[[], bool]) -> None:
        self.run = run
        self.is_signaled = is_signaled
        self.best = BestEvaluation(run)

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
        metrics |= main_decides(self.run.accelerator, lambda: self.best.rate(metrics))
        self.run.log("eval", metrics)
        self._report(epoch, metrics)
        best = metrics.get(BEST_EPOCH)
        self.best.keep(None if best is None else int(best))

    def _folder(self, epoch: int) -> Path:
        return self.run.folder / "eval" / checkpoints.checkpoint_name(epoch)

    def _evaluate(self, epoch: int) -> dict[str, float]:
        """Evaluate the averaged weights, or stop the run here if too few images have scores."""
        run = self.run
        options = run.options
        started = time.perf_counter()
        run.follow("evaluation")
        run.seed_generators()
        with run.state.averaged():
            policy = run.state.policy
            evaluation = Evaluation(
                policy,
                run.test_items,
                run.rewards.test,
                options,
                run.state.strategy,
                run.prompt_sets,
                merges_lora(options, policy.device),
            )
            with run.references.all_named(self.is_signaled):
                metrics = evaluation.run(self._folder(epoch), self.is_signaled, epoch=epoch)
        if metrics is None:
            raise Stopped
        metrics["time/eval_s"] = time.perf_counter() - started
        # As in training, rewards with weight 0 are only monitored.
        for prompt_set in run.prompt_sets:
            shares = {}
            for name, weight in reward_weights(prompt_set.test.weights).items():
                if weight:
                    shares[name] = metrics.get(f"{prompt_set.metrics}{name}_missing", 0.0)
            share = max(shares.values(), default=0.0)
            of_name = f" of {prompt_set.name}" if prompt_set.name else ""
            images = f"the images{of_name} in the evaluation after epoch {epoch}"
            require_scores(share, shares, images, options.train)
        return metrics

    def _report(self, epoch: int, metrics: Mapping[str, float]) -> None:
        run = self.run
        with same_outcome(run.accelerator):
            if run.accelerator.is_main_process:
                self._judge()
            if run.tracker is not None:
                _log_pictures(run.tracker, self._folder(epoch), epoch)
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

    def _judge(self) -> None:
        """Warn of signs in the evaluations so far."""
        rows = self.run.metrics.rows("eval")
        run = self.run
        for prompt_set, rewards_of_set in zip(run.prompt_sets, run.set_rewards, strict=True):
            weights = rewards_of_set.weights
            signs.warn(signs.judge_evaluation(rows, weights, prompt_set.metrics))


def _log_pictures(tracker: Tracker, folder: Path, epoch: int) -> None:
    """Send an evaluation's contact sheet and its first images to the tracker."""
    if (folder / "sheet.png").is_file():  # otherwise no image was finite
        sheet = read_image(folder / "sheet.png")
        tracker.log_images("eval/sheet", [(sheet, f"first test items after epoch {epoch}")], epoch)
    tracked = []
    for row in read_json_lines(folder / "eval_data.jsonl")[:_TRACKED_IMAGES]:
        if row["file"] is None:  # not saved, or not finite
            continue
        scores = []
        for name, score in row["rewards"].items():
            scores.append(f"{name} –" if score is None else f"{name} {score:.3f}")
        caption = f"{row['prompt']} ({', '.join(scores)})"
        tracked.append((read_image(folder / row["file"]), caption))
    if tracked:
        tracker.log_images("eval/images", tracked, epoch)
