"""The loop: sample groups of images, score them in the background, compute advantages, update.

``Trainer.epoch`` is one round of it. Its stages are ``training/sample.py``, ``rewards/queue.py``,
``advantages/groups.py`` and ``training/update.py``, which calls the loss of the objective.
"""

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from accelerate.utils import set_seed

from paco_grpo.advantages import AdvantageResult, compute_advantages
from paco_grpo.checkpoint import files
from paco_grpo.distributed.launch import StopSignal
from paco_grpo.distributed.processes import Stopped, any_process, main_decides
from paco_grpo.evaluation.agreement import of_epoch
from paco_grpo.evaluation.evaluate import Evaluation, EvaluationError
from paco_grpo.evaluation.images import EvaluationFolder
from paco_grpo.evaluation.pictures import log_pictures
from paco_grpo.monitoring import health
from paco_grpo.monitoring.console import epoch_line, epoch_metrics, rewards_line
from paco_grpo.monitoring.observe import SampleObserver
from paco_grpo.monitoring.trackers import finite_numbers
from paco_grpo.policies import lora
from paco_grpo.rewards.queue import ScoreQueue, ScoringError
from paco_grpo.rewards.registry import reward_weights
from paco_grpo.streams import Stream
from paco_grpo.training.build import Run
from paco_grpo.training.plan import merges_lora
from paco_grpo.training.sample import Rollouts, sample_epoch
from paco_grpo.training.update import NonFiniteError
from paco_grpo.training.verification import verify_at_the_end
from paco_grpo.types import Item

logger = logging.getLogger(__name__)


class TrainingStopped(RuntimeError):
    """The run ended early with its state saved; the message says why and how to resume."""

    def __init__(self, message: str, signal_number: int | None = None) -> None:
        super().__init__(message)
        self.signal_number = signal_number  # that asked for it


class Trainer:
    """One run, from its first epoch or from a checkpoint to its end.

    Rows of metrics.jsonl, evaluations and checkpoints carry the number of finished epochs.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.options = run.options
        self.state = run.state
        self.accelerator = run.accelerator
        self.signals = StopSignal()
        # Of this process, since it was started:
        self.epochs_begun = 0
        self.saved_epoch: int | None = None
        # Of the current epoch:
        self.seconds: dict[str, float] = defaultdict(float)  # by phase
        self.started = 0.0
        self.observer = SampleObserver()

    def fit(self) -> None:
        """Run to the end, or to a ``TrainingStopped``: a signal, missing rewards, a NaN."""
        try:
            with self.signals.listening(), self._stopping():
                self._resume()
                self._repeat_evaluations()
                if self.run.probe:
                    # Before the first epoch, because it is done once and is no part of training.
                    self.run.probe.prepare()
                while not self._finished():
                    self._evaluate_if_due()
                    self.epoch()
                    if self.options.save_freq and self.state.epoch % self.options.save_freq == 0:
                        self._save()
                    if any_process(self.accelerator, self._signaled()):
                        raise Stopped
                self._evaluate_if_due(finished=True)
                self._save()
                self._verify()
            self.accelerator.end_training()
        finally:
            self.run.close()
        logger.info("finished after %d epochs: %s", self.state.epoch, self.run.folder)

    def epoch(self) -> None:
        """Sample, score and update once, and log it; ``fit`` saves and evaluates."""
        self._begin()
        queue = ScoreQueue(self.run.rewards.train, self.options.sample.reward_batch_size)
        with contextlib.closing(queue):
            rollouts = self._sample(queue)
            # This needs no scores, so it is done while the last images are scored.
            self._recompute_old_log_probs(rollouts)
            scores = self._scores(queue)
        result = self._advantages(scores, rollouts)
        losses = self._update(rollouts, result)
        observed = self._observe(rollouts, scores)
        self._end()
        metrics = epoch_metrics(
            scores, result.stats, losses, self.seconds, observed, self.options.enable_mem_log
        )
        self._log_epoch(metrics)

    def _begin(self) -> None:
        self.epochs_begun += 1
        self.seconds = defaultdict(float)
        self.started = time.perf_counter()
        self.observer = SampleObserver()
        self._seed_everything()

    def _end(self) -> None:
        self.seconds["epoch"] = time.perf_counter() - self.started
        self.state.train_seconds += self.seconds["epoch"]
        self.state.epoch += 1
        self.state.sampler.advance()

    def _seed_everything(self) -> None:
        """Nothing of ours uses the global generators, but a user's reward may."""
        process = self.accelerator.process_index
        words = [Stream.GLOBAL, self.options.seed, self.state.epoch, process]
        set_seed(int(np.random.SeedSequence(words).generate_state(1)[0]))

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - started

    def _sample(self, queue: ScoreQueue) -> Rollouts:
        """Sample this process's images, each scored in the background as soon as it is decoded."""
        run = self.run
        policy = self.state.policy
        adapter = run.objective.sampling_snapshot(self.state.optimizer_steps)
        sampled_weights = (
            lora.using_adapter(policy, adapter) if adapter else contextlib.nullcontext()
        )

        # ``numbers`` count this process's samples, see ``Rollouts``.
        def deliver(images: list, items: list[Item], numbers: list[int]) -> None:
            queue.submit(images, items, numbers)
            self.observer.add(images, numbers)
            if run.features:
                run.features.add(images, numbers)

        def should_stop() -> bool:
            return self._signaled() or queue.failed()

        try:
            with self._timed("sample"), sampled_weights:
                return sample_epoch(
                    self.state, run.plan, run.train_items, self.options, deliver, should_stop
                )
        except Stopped:
            if not any_process(self.accelerator, self._signaled()):
                self._scores(queue)  # a reward has failed, and this raises its error
            raise

    def _recompute_old_log_probs(self, rollouts: Rollouts) -> None:
        with self._timed("train"):
            self.run.updater.recompute_old_log_probs(rollouts)

    def _scores(self, queue: ScoreQueue) -> dict[str, np.ndarray]:
        """Scores of all N images of the epoch by position, (N,) each; NaN = missing."""
        scores = queue.gathered(self.accelerator, self.run.plan.samples, self._signaled)
        self.seconds["reward_wait"] = queue.wait_seconds
        return {name: scores[:, column] for column, name in enumerate(queue.rewards)}

    def _advantages(self, scores: Mapping[str, np.ndarray], rollouts: Rollouts) -> AdvantageResult:
        run = self.run
        trained = {name: scores[name] for name in run.rewards.weights}
        missing = {name: np.isnan(values) for name, values in trained.items()}
        share = np.any(list(missing.values()), axis=0).mean()
        shares = {name: values.mean() for name, values in missing.items()}
        self._limit_missing(share, shares, f"the images of epoch {self.state.epoch + 1}")
        features = None
        if run.features:
            latents = [sample.clean_latents for sample in rollouts.samples]
            features = run.features.gathered(latents, len(rollouts.item_ids))
        prompts = [run.train_items[i].prompt for i in rollouts.item_ids]
        aggregate_fn = run.rewards.aggregate_fn
        try:
            return compute_advantages(
                trained, rollouts.item_ids, prompts, aggregate_fn, self.options, features
            )
        except ValueError as error:  # from the aggregation, about these scores
            self._stop(
                f"config.train.aggregate_fn failed in epoch {self.state.epoch + 1} ({error})"
            )

    def _limit_missing(self, share: float, shares: Mapping[str, float], images: str) -> None:
        """Stop if more than the allowed share of ``images`` lacks a score.

        ``share`` counts images without all of their scores, ``shares`` those without each one.
        """
        limit = self.options.train.max_missing_reward_fraction
        if share <= limit:
            return
        by_reward = ", ".join(f"{name} {value:.0%}" for name, value in shares.items())
        self._stop(
            f"{share:.0%} of {images} have no score ({by_reward}), more than "
            f"config.train.max_missing_reward_fraction={limit:g} allows. If a judge or reward "
            "service is gone, restart it first"
        )

    def _update(self, rollouts: Rollouts, result: AdvantageResult) -> dict[str, float]:
        with self._timed("train"):
            return self.run.updater.update(
                rollouts, result.advantages, result.kept, self.state.epoch, self._signaled
            )

    def _observe(self, rollouts: Rollouts, scores: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Signs of collapse: health/… and reward/{within,between,kappa}."""
        run = self.run
        with self._timed("health"):
            latents = [sample.clean_latents for sample in rollouts.samples]
            metrics = self.observer.metrics(latents, rollouts.item_ids)
            if run.probe:
                metrics |= run.probe.measure()
            is_open = [bool(item.metadata.get("open")) for item in run.train_items]
            metrics |= of_epoch(scores, rollouts.item_ids, is_open)
        return metrics

    def _log_epoch(self, metrics: dict[str, float]) -> None:
        epoch = self.state.epoch
        findings = []
        if self.accelerator.is_main_process:
            rows = self.run.metrics.rows("train")
            metrics |= health.against_first(metrics, rows[0] if rows else metrics)
            findings = health.judge_epoch([*rows, metrics])
        self._write("train", metrics)
        logger.info(
            "epoch %d/%d: %s; %.1f min left",
            epoch,
            self.options.num_epochs,
            epoch_line(metrics),
            self._seconds_left() / 60,
        )
        for finding in findings:
            logger.warning(
                "after epoch %d: %s (%s in metrics.jsonl)", epoch, finding.message, finding.sign
            )
        collapsed = [finding.message for finding in findings if finding.collapse]
        if self.options.train.stop_on_collapse and any_process(self.accelerator, bool(collapsed)):
            why = collapsed[0] if collapsed else "see the message of the main process"
            self._stop(
                f"config.train.stop_on_collapse: after epoch {epoch}, {why}. An earlier checkpoint "
                "may be better"
            )

    def _seconds_left(self) -> float:
        """Estimated from the epochs so far."""
        epochs_left = self.options.num_epochs - self.state.epoch
        seconds = self.state.train_seconds / self.state.epoch * epochs_left
        if self.options.max_train_minutes is None:
            return seconds
        allowed = 60 * self.options.max_train_minutes - self.state.train_seconds
        return max(0.0, min(seconds, allowed))

    def _evaluate_if_due(self, finished: bool = False) -> None:
        epoch = self.state.epoch
        frequency = self.options.eval_freq
        if not finished and (frequency == 0 or epoch % frequency):
            return
        evaluated = main_decides(
            self.accelerator, lambda: [row["epoch"] for row in self.run.metrics.rows("eval")]
        )
        if epoch in evaluated:
            return  # before the run was resumed
        # An evaluation that was interrupted has left images, which need not be sampled again.
        earlier = self.run.earlier
        metrics = self._evaluate(epoch, earlier.same_evaluations and epoch == earlier.epoch)
        self._write("eval", metrics)
        self._report_evaluation(epoch, metrics)

    def _repeat_evaluations(self) -> None:
        """Score the images of evaluations again that lack scores, once for each evaluation.

        All images must be there, because the weights are gone, unless the run resumes at them.
        """
        if not self.run.earlier.same_evaluations:
            return
        incomplete = main_decides(self.accelerator, self._incomplete_evaluations)
        for row in incomplete:
            epoch = row["epoch"]
            logger.info("repeating the evaluation after epoch %d, which lacks scores", epoch)
            metrics = self._evaluate(epoch, keep_images=True)
            if self.accelerator.is_main_process:
                head = {name: row[name] for name in ("epoch", "step", "train_time", "phase")}
                self.run.metrics.replace(head | metrics | {"eval/repeated": 1.0})
            self._report_evaluation(epoch, metrics)

    def _incomplete_evaluations(self) -> list[dict[str, Any]]:
        rows = []
        for row in self.run.metrics.rows("eval"):
            folder = EvaluationFolder(self._evaluation_folder(row["epoch"]))
            num_images = int(row.get("eval/num_images", 0))
            if row.get("eval/missing_share", 0) == 0 or "eval/repeated" in row:
                continue
            has_images = all(folder.read(number) for number in range(num_images))
            if has_images or row["epoch"] == self.state.epoch:
                rows.append(row)
        return rows

    def _evaluation_folder(self, epoch: int) -> Path:
        return self.run.folder / "eval" / files.checkpoint_name(epoch)

    def _evaluate(self, epoch: int, keep_images: bool) -> dict[str, float]:
        """Evaluate the averaged weights, or stop the run here if too few images have scores."""
        started = time.perf_counter()
        self._seed_everything()
        with self.state.averaged():
            evaluation = Evaluation(
                self.state.policy,
                self.run.test_items,
                self.run.rewards.test,
                self.options,
                self.state.strategy,
                merges_lora(self.options, self.state.policy.device),
            )
            folder = self._evaluation_folder(epoch)
            metrics = evaluation.run(folder, self._signaled, keep_images)
        if metrics is None:
            raise Stopped
        metrics["time/eval_s"] = time.perf_counter() - started
        # As in training, rewards with weight 0 are only monitored.
        weights = reward_weights(self.options.test.reward_fn or self.options.train.reward_fn)
        shares = {
            name: metrics.get(f"eval/{name}_missing", 0.0) for name in weights if weights[name]
        }
        self._limit_missing(
            max(shares.values(), default=0.0),
            shares,
            f"the images of the evaluation after epoch {epoch}",
        )
        return metrics

    def _report_evaluation(self, epoch: int, metrics: Mapping[str, float]) -> None:
        if self.accelerator.is_main_process:
            rows = self.run.metrics.rows("eval")
            for finding in health.judge_evaluation(rows, self.run.rewards.weights):
                logger.warning("%s (%s in metrics.jsonl)", finding.message, finding.sign)
            log_pictures(self.run.tracker, self._evaluation_folder(epoch), epoch)
        logger.info(
            "evaluation after epoch %d: %d images, %s",
            epoch,
            metrics["eval/num_images"],
            rewards_line(metrics, "eval/"),
        )

    def _resume(self) -> None:
        if not self.options.resume_from:
            return
        run = self.run
        checkpoint = run.earlier.checkpoint
        if checkpoint is not None:
            run.checkpoints.load(checkpoint)
            if checkpoint.parent == run.checkpoints.root:
                self.saved_epoch = self.state.epoch
            logger.info("resumed from %s", checkpoint)
        if self.accelerator.is_main_process:
            if checkpoint is None:
                files.archive_superseded(run.folder / "eval", -1)
                run.metrics.set_aside()
            else:
                files.archive_superseded(run.checkpoints.root, self.state.epoch)
                files.archive_superseded(run.folder / "eval", self.state.epoch)
                run.metrics.keep_until(self.state.epoch)
        self.accelerator.wait_for_everyone()

    def _verify(self) -> None:
        """Compare the saved adapter in plain diffusers with the averaged weights."""
        if self.accelerator.is_main_process:
            checkpoint = self.run.folder / "checkpoints" / files.checkpoint_name(self.state.epoch)
            with self.state.averaged():
                verify_at_the_end(
                    self.state.policy, self.options, checkpoint, self.run.test_items[0]
                )
        self.accelerator.wait_for_everyone()

    def _finished(self) -> bool:
        limit = self.options.max_train_minutes
        over = limit is not None and self.state.train_seconds >= 60 * limit
        # Clocks differ between processes, so one process's clock decides for all.
        over = any_process(self.accelerator, over and self.accelerator.is_main_process)
        return over or self.state.epoch >= self.options.num_epochs

    def _signaled(self) -> bool:
        return self.signals.received is not None

    @contextlib.contextmanager
    def _stopping(self) -> Iterator[None]:
        try:
            yield
        except Stopped:
            self._stop("by a signal", self.signals.received)
        except ScoringError as error:
            self._stop(f"a reward failed after {self.state.epoch} finished epochs ({error})")
        except EvaluationError as error:
            self._stop(
                f"after epoch {self.state.epoch}, {error}. Its weights are not saved now; an "
                "earlier checkpoint may be better",
                save=False,
            )
        except NonFiniteError as error:
            if error.weights_changed:
                self._stop(str(error), save=False)
            folder = self.run.checkpoints.save(
                f"stopped_{files.checkpoint_name(self.state.epoch + 1)}"
            )
            self._stop(f"{error} State at that point: {folder}", save=False)

    def _stop(self, why: str, signal_number: int | None = None, save: bool = True) -> NoReturn:
        if save:
            self._save()
        self.accelerator.end_training()
        name = self.options.run_name
        resume = f"the same command with --config.run_name={name} --config.resume_from=latest"
        raise TrainingStopped(f"{why}. To resume: {resume}", signal_number)

    def _save(self) -> None:
        if self.saved_epoch == self.state.epoch:
            return
        if self.saved_epoch is not None and not self.run.checkpoints.root.is_dir():
            logger.warning(
                "%s was removed, and earlier checkpoints with it", self.run.checkpoints.root
            )
        self.run.checkpoints.save()
        self.saved_epoch = self.state.epoch

    def _write(self, phase: str, metrics: Mapping[str, float]) -> None:
        """Append a row to metrics.jsonl and log it to the tracker (main process)."""
        if self.accelerator.is_main_process:
            head = {
                "epoch": self.state.epoch,
                "step": self.state.optimizer_steps,
                "train_time": self.state.train_seconds,
                "phase": phase,
            }
            self.run.metrics.write(head | dict(metrics))
            self.run.tracker.log(finite_numbers(metrics), self.state.epoch)
        self.accelerator.wait_for_everyone()
