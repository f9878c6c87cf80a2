"""The loop: sample groups of images, score them while the next batch is drawn, turn scores into advantages, update.

``Trainer.train`` reads top to bottom; each arrow of the architecture's "one epoch" is one call in ``_epoch``.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping

import numpy as np

from paco_grpo.advantages import compute_advantages
from paco_grpo.data.sampler import EpochSamples
from paco_grpo.policies.adapters import blend_old_adapter, old_adapter_decay
from paco_grpo.sampling.schedule import draw_noise_steps
from paco_grpo.training import checkpoint as ckpt
from paco_grpo.training import health, state
from paco_grpo.training.collect import Rollouts, collect
from paco_grpo.training.evaluation import evaluate
from paco_grpo.training.observe import SampleObserver
from paco_grpo.training.processes import StopSignal, Turns, any_process
from paco_grpo.training.reporting import epoch_line, epoch_metrics, evaluation_line
from paco_grpo.training.scoring import ScoringError, ScoringQueue
from paco_grpo.training.setup import Run
from paco_grpo.training.speed import on_cuda, tail_of
from paco_grpo.training.update import NonFiniteError

logger = logging.getLogger(__name__)


class TrainingStopped(RuntimeError):
    """The run ended early with its state saved; the message says why and how to go on.

    Attributes:
        signal_number: Of the signal that asked for it, else None.
    """

    def __init__(self, message: str, signal_number: int | None = None) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class Trainer:
    """One run, from its first epoch or from a checkpoint to its end.

    ``progress.epoch`` counts finished epochs; rows of metrics.jsonl, evaluations and checkpoints carry that number.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.config, self.policy, self.accelerator = run, run.config, run.policy, run.accelerator
        self.progress = state.Progress()
        self.signals = StopSignal()
        self.saved_epoch: int | None = None
        self.started = time.perf_counter()
        self.rng = ckpt.capture_rng()

    def train(self) -> None:
        """Run to the end.

        Raises:
            TrainingStopped: A signal, missing rewards or a non-finite number ended it early; the state is saved.
            CheckpointError: State could not be saved or found.
        """
        with self.signals.listening():
            self._resume()
            while True:
                finished = self._finished()
                if self._evaluation_due(finished):
                    self._evaluate()
                if finished:
                    break
                self._epoch()
                if self.config.save_freq and self.progress.epoch % self.config.save_freq == 0:
                    self._save()
                self._stop_if_asked()
            self._save()
        self.run.close()
        logger.info(
            "finished after %d epochs and %d optimizer steps: %s",
            self.progress.epoch, self.run.updater.step, self.run.folder,
        )  # fmt: skip

    def _epoch(self) -> None:
        started = time.perf_counter()
        self.run.journal.epoch = self.progress.epoch
        self.rng = ckpt.capture_rng()
        samples = self.run.sampler.samples()
        positions = samples.positions_of(self.accelerator.process_index, self.accelerator.num_processes)
        rewards = {**self.run.train_rewards, **self.run.watched_rewards}
        queue, observer = ScoringQueue(rewards, self.config.sample.reward_batch_size), SampleObserver()
        try:
            rollouts = self._sample(samples, positions, queue, observer)
            sampled = time.perf_counter()
            observed = self._while_rewards_come_in(rollouts, samples, observer)
            ready = time.perf_counter()
            scores = self._wait_for_rewards(queue, len(positions), len(samples.item_ids))
        finally:
            queue.close()
        trained = {name: scores[name] for name in self.run.train_rewards}
        self._refuse_if_too_many_missing(trained)
        result = compute_advantages(
            trained,
            samples.item_ids,
            [self.run.train_items[i].prompt for i in samples.item_ids],
            reward_weights=self.run.train_weights,
            aggregate_fn=self.run.aggregate_fn,
            global_std=self.config.sample.global_std,
            per_prompt=self.config.per_prompt_stat_tracking,
            rank=self.config.train.rank_grpo,
        )
        scored = time.perf_counter()
        losses = self._update(rollouts, positions, result.advantages, result.kept)
        updated = time.perf_counter()
        observed |= self.run.probe.measure() if self.run.probe else {}
        self.progress.epoch += 1
        self.run.sampler.advance()
        self.rng = ckpt.capture_rng()
        ended = time.perf_counter()
        self.progress.train_seconds += ended - started
        times = {
            "sample": sampled - started,
            "reward_wait": queue.wait_seconds,
            "train": updated - scored + ready - sampled,
            "health": ended - updated,
            "epoch": ended - started,
        }
        observed["time/reward_hidden_share"] = queue.hidden_share
        self._finish_epoch(epoch_metrics(scores, result.stats, losses, times, observed, self.config.enable_mem_log))

    # --- parts of an epoch ------------------------------------------------------------------------------------------

    def _sample(
        self, samples: EpochSamples, positions: np.ndarray, queue: ScoringQueue, observer: SampleObserver
    ) -> Rollouts | None:
        """None: sampling was cut short because a reward has failed; waiting for the rewards then says so."""
        sample, items = self.config.sample, self.run.train_items
        train = self.config.train
        turns = Turns(self.accelerator, lambda: self._signalled() or queue.failed())

        with self.policy.old() if train.loss_type == "nft" else contextlib.nullcontext():
            rollouts = collect(
                self.policy,
                items,
                samples,
                positions,
                queue,
                resolution=train.resolution,
                item_size=self.config.item_size,
                batch_size=self.run.plan.sample_batch_size,
                num_steps=sample.num_steps,
                noise_steps=draw_noise_steps(
                    sample.noise_steps, sample.num_noise_steps, self.config.seed, self.run.sampler.epoch
                ),
                noise_level=sample.noise_level,
                cps=sample.cps,
                same_latent=sample.same_latent,
                merge_lora=sample.merge_lora and self.config.use_lora,
                tail=tail_of(self.config),
                overlap_decode=on_cuda(self.config.speed.overlap_decode, self.policy.device),
                on_images=observer.add,
                stop_after_batch=turns.stop_after_batch,
                turns=self.run.engine.turns,
            )
        if rollouts is not None and turns.stop_after_last():
            rollouts = None
        self._stop_if_asked()
        return rollouts

    def _while_rewards_come_in(
        self, rollouts: Rollouts | None, samples: EpochSamples, observer: SampleObserver
    ) -> dict[str, float]:
        """What needs no scores is done while the last batches are being scored."""
        if rollouts is None:
            return {}
        self.run.updater.prepare(rollouts)
        if self.run.probe:
            self.run.probe.prepare()
        return observer.metrics(rollouts, samples.item_ids, self.accelerator)

    def _wait_for_rewards(self, queue: ScoringQueue, local: int, total: int) -> dict[str, np.ndarray]:
        """Scores of all processes by global position, (total,) each; NaN = missing."""
        try:
            scores = queue.gathered(self.accelerator, local, total, self._signalled)
        except ScoringError as error:
            self._save()
            raise TrainingStopped(
                f"a reward failed in epoch {self.progress.epoch + 1} ({error}). {self._how_to_go_on()}"
            ) from error
        if scores is None:
            self._stop_if_asked()
        return {name: scores[:, column] for column, name in enumerate(queue.rewards)}

    def _refuse_if_too_many_missing(self, rewards: Mapping[str, np.ndarray]) -> None:
        share = float(np.isnan(np.stack(list(rewards.values()))).any(axis=0).mean())
        limit = self.config.train.max_missing_reward_fraction
        if share <= limit:
            return
        self._save()
        each = ", ".join(f"{name} {np.isnan(values).mean():.0%}" for name, values in rewards.items())
        raise TrainingStopped(
            f"{share:.0%} of the images of epoch {self.progress.epoch + 1} have no score ({each}), more than "
            f"config.train.max_missing_reward_fraction={limit:g} allows; look at the log of the reward server. "
            + self._how_to_go_on()
        )

    def _update(
        self, rollouts: Rollouts, positions: np.ndarray, advantages: np.ndarray, kept: np.ndarray
    ) -> dict[str, float]:
        try:
            losses = self.run.updater.run(rollouts, positions, advantages, kept, self.progress.epoch)
        except NonFiniteError as error:
            name = f"stopped_{ckpt.checkpoint_name(self.progress.epoch + 1)}"
            folder = state.save(self.run, self._progress_now(), self.rng, name)
            raise TrainingStopped(f"{error} State at that point: {folder}. {self._how_to_go_on()}") from error
        if self.config.train.loss_type == "nft":
            blend_old_adapter(self.policy, old_adapter_decay(self.run.updater.step, self.run.decay_type))
        return losses

    def _finish_epoch(self, metrics: dict[str, float]) -> None:
        """Write and tell the epoch's numbers, and look for signs of collapse."""
        findings = []
        if self.accelerator.is_main_process:
            rows = [row for row in self.run.metrics.rows() if row["phase"] == "train"]
            metrics |= health.against_first(metrics, rows[0] if rows else metrics)
            steps = self.run.plan.gradient_steps * self.config.train.num_inner_epochs
            findings = health.judge_epoch([*rows, metrics], self.config.health, steps)
        self._write("train", metrics)
        logger.info(
            "epoch %d/%d: %s; %s", self.progress.epoch, self.config.num_epochs, epoch_line(metrics), self._time_left()
        )
        for finding in findings:
            logger.warning("after epoch %d: %s (config.health.%s)", self.progress.epoch, finding.message, finding.sign)
        collapsed = [finding for finding in findings if finding.collapse]
        if self.config.train.stop_on_collapse and any_process(self.accelerator, bool(collapsed)):
            self._save()
            why = collapsed[0].message if collapsed else "see the message of the main process"
            raise TrainingStopped(
                f"config.train.stop_on_collapse: after epoch {self.progress.epoch}, {why}. An earlier checkpoint in "
                f"{self.run.folder / 'checkpoints'} may be better: --config.resume_from=PATH"
            )

    # --- evaluation -------------------------------------------------------------------------------------------------

    def _evaluation_due(self, finished: bool) -> bool:
        epoch, frequency = self.progress.epoch, self.config.eval_freq
        if self.run.metrics.has_evaluation(epoch):
            return False
        if epoch == 0 and not finished:
            return self.config.test.at_start
        return finished or (frequency > 0 and epoch % frequency == 0)

    def _evaluate(self) -> None:
        started = time.perf_counter()
        epoch = self.run.journal.epoch = self.progress.epoch
        folder = self.run.folder / "eval" / ckpt.checkpoint_name(epoch)
        try:
            with self.run.ema.applied() if self.run.ema else contextlib.nullcontext():
                metrics = evaluate(
                    self.policy,
                    self.run.test_items,
                    self.run.test_rewards,
                    self.config,
                    self.accelerator,
                    folder,
                    self._signalled,
                    self.run.engine.joint_forwards,
                )
        except ScoringError as error:
            self._save()
            raise TrainingStopped(
                f"a reward failed in the evaluation after epoch {epoch} ({error}). {self._how_to_go_on()}"
            ) from error
        if metrics is None:
            self._stop_if_asked()
            return
        metrics["time/eval_s"] = time.perf_counter() - started
        self._write("eval", metrics)
        if self.saved_epoch == epoch and self.accelerator.is_main_process:  # saved first: now it can say how it scores
            state.write_cards(self.run, epoch, self.run.folder / "checkpoints" / ckpt.checkpoint_name(epoch))
        self._compare_rewards()
        if self.run.tracker is not None:
            self.run.log_pictures(folder, epoch)
        logger.info("evaluation after epoch %d: %s", epoch, evaluation_line(metrics))

    def _compare_rewards(self) -> None:
        """Trained rewards beside those that only look on, since the first evaluation."""
        if not self.accelerator.is_main_process:
            return
        rows = [row for row in self.run.metrics.rows() if row["phase"] == "eval"]
        trained = [name for name, weight in self.run.train_weights.items() if weight]
        if line := health.side_by_side(rows, trained):
            logger.info("since the first evaluation: %s", line)
        for finding in health.judge_evaluation(rows, trained, self.config.health):
            logger.warning("%s (config.health.%s)", finding.message, finding.sign)

    # --- going on and stopping --------------------------------------------------------------------------------------

    def _resume(self) -> None:
        if not self.config.resume_from:
            return
        found = ckpt.find_checkpoint(self.config.resume_from, self.run.folder)
        if found is None:
            logger.info("no checkpoint in %s yet: starting from the beginning", self.run.folder)
        else:
            self.progress = state.load(self.run, found)
            self.rng = ckpt.capture_rng()
            if found.parent.parent == self.run.folder:
                self.saved_epoch = self.progress.epoch
            self._leave_the_old_course()
            logger.info("resumed from %s after %d epochs", found, self.progress.epoch)
        self.run.journal.load()
        if self.accelerator.is_main_process:
            self.run.metrics.keep_until(self.progress.epoch if found else -1)
        self.accelerator.wait_for_everyone()

    def _leave_the_old_course(self) -> None:
        if self.accelerator.is_main_process:
            for name in ("checkpoints", "eval"):
                for path in ckpt.set_aside_after(self.run.folder / name, self.progress.epoch):
                    logger.info("%s is later than the checkpoint gone on from; it is now %s", name, path)

    def _finished(self) -> bool:
        limit = self.config.max_train_minutes
        over = limit is not None and self.progress.train_seconds >= 60 * limit
        # Clocks differ between processes, so one process's clock decides for all.
        over = any_process(self.accelerator, over and self.accelerator.is_main_process)
        return over or self.progress.epoch >= self.config.num_epochs

    def _signalled(self) -> bool:
        return self.signals.received is not None

    def _stop_if_asked(self) -> None:
        if any_process(self.accelerator, self._signalled()):
            self._save()
            raise TrainingStopped(f"by a signal. {self._how_to_go_on()}", self.signals.received)

    def _save(self) -> None:
        """A checkpoint of the last finished epoch, unless there is one already."""
        if self.saved_epoch != self.progress.epoch:
            state.save(self.run, self._progress_now(), self.rng)
            self.saved_epoch = self.progress.epoch

    def _progress_now(self) -> state.Progress:
        return state.Progress(self.progress.epoch, self.progress.train_seconds, self._elapsed())

    def _how_to_go_on(self) -> str:
        return f"To go on: the same command with --config.run_name={self.config.run_name} --config.resume_from=latest"

    # --- telling ----------------------------------------------------------------------------------------------------

    def _elapsed(self) -> float:
        return self.progress.elapsed + time.perf_counter() - self.started

    def _write(self, phase: str, metrics: Mapping[str, float]) -> None:
        if self.accelerator.is_main_process:
            epoch = self.progress.epoch
            head = {"epoch": epoch, "step": self.run.updater.step, "time": self._elapsed(), "phase": phase}
            self.run.metrics.write(head | {"train_time": self.progress.train_seconds} | dict(metrics))
            self.run.tracker.log(metrics, epoch)
        self.accelerator.wait_for_everyone()

    def _time_left(self) -> str:
        per_epoch = self.progress.train_seconds / max(1, self.progress.epoch)
        left = per_epoch * (self.config.num_epochs - self.progress.epoch)
        if self.config.max_train_minutes is not None:
            left = min(left, 60 * self.config.max_train_minutes - self.progress.train_seconds)
        return f"{max(0.0, left) / 60:.1f} min of training left"
