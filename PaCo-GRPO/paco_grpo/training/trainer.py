"""The loop: sample groups of images, score them in the background, turn scores into advantages, update."""

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NoReturn

import numpy as np
from accelerate.utils import set_seed

from paco_grpo.advantages import AdvantageResult, compute_advantages
from paco_grpo.checkpoint import files
from paco_grpo.data.sampler import EpochSamples
from paco_grpo.distributed.launch import StopSignal
from paco_grpo.distributed.processes import Stopped, any_process, main_decides
from paco_grpo.evaluation.agreement import of_epoch
from paco_grpo.evaluation.evaluate import evaluate
from paco_grpo.evaluation.pictures import log_pictures
from paco_grpo.monitoring import health
from paco_grpo.monitoring.console import epoch_line, epoch_metrics, rewards_line
from paco_grpo.monitoring.observe import SampleObserver
from paco_grpo.policies import lora
from paco_grpo.rewards.queue import ScoreQueue, ScoringError
from paco_grpo.training.build import Run
from paco_grpo.training.plan import merges_lora
from paco_grpo.training.sample import Rollouts, sample_epoch
from paco_grpo.training.update import NonFiniteError

logger = logging.getLogger(__name__)

_GLOBAL = 18  # first word of the seeds of the global generators


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
        self.run, self.options, self.state, self.accelerator = (
            run,
            run.options,
            run.state,
            run.accelerator,
        )
        self.epochs_trained = 0  # by this process, since it was started
        self.signals = StopSignal()
        self.saved_epoch: int | None = None
        self.seconds: dict[str, float] = defaultdict(float)  # of each phase of the current epoch
        self.started, self.observer = 0.0, SampleObserver()  # of the current epoch

    def fit(self) -> None:
        """Run to the end, or to a ``TrainingStopped``: a signal, missing rewards or a number that is not finite."""
        try:
            with self.signals.listening(), self._stopping():
                self._resume()
                while not self._finished():
                    self._evaluate_if_due()
                    self.epoch()
                    if self.options.save_freq and self.state.epoch % self.options.save_freq == 0:
                        self._save()
                    if any_process(self.accelerator, self._signaled()):
                        raise Stopped
                self._evaluate_if_due(finished=True)
                self._save()
            self.accelerator.end_training()
        finally:
            self.run.close()
        logger.info("finished after %d epochs: %s", self.state.epoch, self.run.folder)

    def epoch(self) -> None:
        """Sample, score and update once, and log it; saving and evaluating are left to ``fit``."""
        samples = self._begin()
        with contextlib.closing(
            ScoreQueue(self.run.rewards.train, self.options.sample.reward_batch_size)
        ) as queue:
            rollouts = self._sample(samples, queue)
            self._prepare(rollouts)  # needs no scores, so it runs while the last images are scored
            scores = self._scores(queue, len(samples.item_ids))
        result = self._advantages(scores, rollouts)
        losses = self._update(rollouts, result)
        observed = self._observe(rollouts, scores)
        self._end()
        self._log_epoch(
            epoch_metrics(
                scores, result.stats, losses, self.seconds, observed, self.options.enable_mem_log
            )
        )

    def _begin(self) -> EpochSamples:
        self.seconds, self.started, self.observer = (
            defaultdict(float),
            time.perf_counter(),
            SampleObserver(),
        )
        self._seed_everything()
        return self.state.sampler.samples()

    def _end(self) -> None:
        self.seconds["epoch"] = time.perf_counter() - self.started
        self.state.train_seconds += self.seconds["epoch"]
        self.state.epoch += 1
        self.epochs_trained += 1
        self.state.sampler.advance()

    def _seed_everything(self) -> None:
        """Nothing of ours uses the global generators, but a user's reward may."""
        words = [_GLOBAL, self.options.seed, self.state.epoch, self.accelerator.process_index]
        set_seed(int(np.random.SeedSequence(words).generate_state(1)[0]))

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - started

    def _sample(self, samples: EpochSamples, queue: ScoreQueue) -> Rollouts:
        run, policy = self.run, self.state.policy
        adapter = run.objective.sampling_snapshot(self.state.step)

        def on_images(images: list, numbers: list[int]) -> None:
            for each in filter(None, (self.observer, run.features)):
                each.add(images, numbers)

        try:
            with (
                self._timed("sample"),
                lora.snapshot(policy, adapter) if adapter else contextlib.nullcontext(),
            ):
                return sample_epoch(
                    policy, run.train_items, samples, queue, self.options, self.state.strategy,
                    batch_size=run.plan.sample_batch_size, epoch=self.state.sampler.epoch, on_images=on_images,
                    should_stop=lambda: self._signaled() or queue.failed(),
                )  # fmt: skip
        except Stopped:
            if not any_process(self.accelerator, self._signaled()):
                self._scores(
                    queue, len(samples.item_ids)
                )  # raises the error of the reward that failed
            raise

    def _prepare(self, rollouts: Rollouts) -> None:
        with self._timed("train"):
            self.run.updater.prepare(rollouts)
            if self.run.probe:
                self.run.probe.prepare()

    def _scores(self, queue: ScoreQueue, total: int) -> dict[str, np.ndarray]:
        """Scores of all processes by global position, (total,) each; NaN = missing."""
        scores = queue.gathered(self.accelerator, total, self._signaled)
        self.seconds["reward_wait"] = queue.wait_seconds
        return {name: scores[:, column] for column, name in enumerate(queue.rewards)}

    def _advantages(self, scores: Mapping[str, np.ndarray], rollouts: Rollouts) -> AdvantageResult:
        train, trained, features = (
            self.options.train,
            {name: scores[name] for name in self.run.rewards.weights},
            None,
        )
        share = float(np.isnan(np.stack(list(trained.values()))).any(axis=0).mean())
        if share > train.max_missing_reward_fraction:
            each = ", ".join(
                f"{name} {np.isnan(values).mean():.0%}" for name, values in trained.items()
            )
            self._stop(
                f"{share:.0%} of the images of epoch {self.state.epoch + 1} have no score ({each}), more than "
                f"config.train.max_missing_reward_fraction={train.max_missing_reward_fraction:g} allows"
            )
        if self.run.features:
            latents = [sample.clean_latents for sample in rollouts.samples]
            features = self.run.features.gathered(latents, len(rollouts.item_ids))
        try:
            return compute_advantages(
                trained,
                rollouts.item_ids,
                [self.run.train_items[i].prompt for i in rollouts.item_ids],
                reward_weights=self.run.rewards.weights,
                aggregate_fn=self.run.rewards.aggregate_fn,
                global_std=self.options.sample.global_std,
                per_prompt=self.options.per_prompt_stat_tracking,
                rank=train.rank_grpo,
                features=features,
                entropy_bonus=train.perceptual_entropy,
                nearest_neighbor=train.neighbor_factor,
            )
        except ValueError as error:  # from the aggregation, about these scores
            self._stop(
                f"config.train.aggregate_fn failed in epoch {self.state.epoch + 1} ({error})"
            )

    def _update(self, rollouts: Rollouts, result: AdvantageResult) -> dict[str, float]:
        with self._timed("train"):
            return self.run.updater.run(
                rollouts, result.advantages, result.kept, self.state.epoch, self._signaled
            )

    def _observe(self, rollouts: Rollouts, scores: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Signs of collapse: health/… and reward/{within,between,kappa}."""
        with self._timed("health"):
            found = self.observer.metrics(
                [sample.clean_latents for sample in rollouts.samples], rollouts.item_ids
            )
            found |= self.run.probe.measure() if self.run.probe else {}
            return found | of_epoch(
                scores,
                rollouts.item_ids,
                [bool(i.metadata.get("open")) for i in self.run.train_items],
            )

    def _log_epoch(self, metrics: dict[str, float]) -> None:
        findings, epoch = [], self.state.epoch
        if self.accelerator.is_main_process:
            rows = self.run.metrics.rows("train")
            metrics |= health.against_first(metrics, rows[0] if rows else metrics)
            findings = health.judge_epoch([*rows, metrics])
        self._write("train", metrics)
        left = self.state.train_seconds / epoch * (self.options.num_epochs - epoch)
        if self.options.max_train_minutes is not None:
            left = max(
                0.0, min(left, 60 * self.options.max_train_minutes - self.state.train_seconds)
            )
        logger.info(
            "epoch %d/%d: %s; %.1f min left",
            epoch,
            self.options.num_epochs,
            epoch_line(metrics),
            left / 60,
        )
        for finding in findings:
            logger.warning(
                "after epoch %d: %s (%s in metrics.jsonl)", epoch, finding.message, finding.sign
            )
        collapsed = [finding.message for finding in findings if finding.collapse]
        if self.options.train.stop_on_collapse and any_process(self.accelerator, bool(collapsed)):
            why = collapsed[0] if collapsed else "see the message of the main process"
            self._stop(
                f"config.train.stop_on_collapse: after epoch {epoch}, {why}. An earlier checkpoint may be better"
            )

    def _evaluate_if_due(self, finished: bool = False) -> None:
        epoch, frequency = self.state.epoch, self.options.eval_freq
        if not finished and (frequency == 0 or epoch % frequency):
            return
        if epoch in main_decides(
            self.accelerator, lambda: [row["epoch"] for row in self.run.metrics.rows("eval")]
        ):
            return  # before the run was resumed
        folder, started = (
            self.run.folder / "eval" / files.checkpoint_name(epoch),
            time.perf_counter(),
        )
        self._seed_everything()
        with self.state.averaged():
            metrics = evaluate(
                self.state.policy,
                self.run.test_items,
                self.run.rewards.test,
                self.options,
                self.state.strategy,
                folder,
                self._signaled,
                merge_lora=merges_lora(self.options, self.state.policy.device),
            )
        if metrics is None:
            raise Stopped
        metrics["time/eval_s"] = time.perf_counter() - started
        self._write("eval", metrics)
        if self.accelerator.is_main_process:
            rows = self.run.metrics.rows("eval")
            for finding in health.judge_evaluation(rows, self.run.rewards.weights):
                logger.warning("%s (%s in metrics.jsonl)", finding.message, finding.sign)
            log_pictures(self.run.tracker, folder, epoch)
        images = metrics["eval/num_images"]
        logger.info(
            "evaluation after epoch %d: %d images, %s",
            epoch,
            images,
            rewards_line(metrics, "eval/"),
        )

    def _resume(self) -> None:
        if not self.options.resume_from:
            return
        wanted, folder = self.options.resume_from, self.run.folder
        found = main_decides(self.accelerator, lambda: files.find_checkpoint(wanted, folder))
        if found is None:
            logger.warning("%s has no checkpoint, starting from the beginning", folder)
        else:
            self.run.checkpoints.load(found)
            if found.parent.parent == folder:
                self.saved_epoch = self.state.epoch
            logger.info("resumed from %s", found)
        if self.accelerator.is_main_process:
            for name in ("checkpoints", "eval") if found else ():
                files.archive_superseded(folder / name, self.state.epoch)
            self.run.metrics.keep_until(self.state.epoch if found else -1)
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
        resume = f"the same command with --config.run_name={self.options.run_name} --config.resume_from=latest"
        raise TrainingStopped(f"{why}. To resume: {resume}", signal_number)

    def _save(self) -> None:
        if self.saved_epoch != self.state.epoch:
            self.run.checkpoints.save()
            self.saved_epoch = self.state.epoch

    def _write(self, phase: str, metrics: Mapping[str, float]) -> None:
        if self.accelerator.is_main_process:
            epoch, seconds = self.state.epoch, self.state.train_seconds
            head = {"epoch": epoch, "step": self.state.step, "train_time": seconds, "phase": phase}
            self.run.metrics.write(head | dict(metrics))
            self.run.tracker.log(metrics, epoch)
        self.accelerator.wait_for_everyone()
