"""The loop: sample groups of images, score them in the background, compute advantages, update.

``Trainer.epoch`` is one round of it. Its stages are ``training/sample.py``, ``rewards/queue.py``,
``advantages/groups.py`` and ``training/update.py``, which calls the loss of the objective.
"""

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence

import numpy as np
from PIL import Image

from paco_grpo.advantages.groups import AdvantageResult, advantages_of_sets
from paco_grpo.distributed import Stopped, any_process, gather_rows, same_outcome
from paco_grpo.monitoring import signs
from paco_grpo.monitoring.health import SampleObserver
from paco_grpo.monitoring.metrics import epoch_line, epoch_metrics, of_epoch, set_metrics
from paco_grpo.monitoring.progress import progress
from paco_grpo.policies import lora
from paco_grpo.rewards.queue import ScoreQueue
from paco_grpo.rewards.registry import watched_rewards
from paco_grpo.training.build import record_start
from paco_grpo.training.evaluations import Evaluations
from paco_grpo.training.resume import load_state
from paco_grpo.training.run import Run
from paco_grpo.training.sample import Rollouts
from paco_grpo.training.stopping import (
    StopSignal,
    StopTraining,
    TrainingStopped,
    require_scores,
    resumable,
)
from paco_grpo.training.verification import verify_run
from paco_grpo.types import Item

logger = logging.getLogger(__name__)

_IDLE_EPOCHS = 10  # without a trained image, after which a run stops


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
        self.evaluations = Evaluations(run, self._signaled)
        self.epochs_begun = 0  # by this process, since it was started
        self.idle_epochs = 0  # the last ones in a row in which no image was trained
        # Of the current epoch:
        self.seconds: dict[str, float] = defaultdict(float)  # by phase
        self.started = 0.0
        self.observer = SampleObserver()

    def epoch(self) -> None:
        """Sample, score and update once, and log it; ``fit`` saves and evaluates."""
        self._begin()
        run = self.run
        rewards = run.rewards
        watched = watched_rewards([prompt_set.train.weights for prompt_set in run.prompt_sets])
        batch_size = self.options.sample.reward_batch_size
        queue = ScoreQueue(rewards.train, batch_size, watched, self.state.epoch + 1)
        with contextlib.closing(queue):
            rollouts = self._sample(queue)
            with self._timed("train"):
                # This needs no scores, so it is done while the last images are scored. An objective
                # that leaves images out chooses by the scores: then ``update`` does it.
                if run.objective.keeps_all:
                    run.updater.recompute_old_log_probs(rollouts)
            scores = self._scores(queue)
        run.follow("training")
        run.references.finish(self._signaled)  # a bad image is found before the first update
        result = self._advantages(scores, rollouts)
        steps_before = self.state.optimizer_steps
        with self._timed("train"):
            losses = run.updater.update(
                rollouts, result.advantages, result.kept, self.state.epoch, self._signaled
            )
        observed = self._observe(rollouts, scores)
        self._end()
        metrics = epoch_metrics(
            scores, result.stats, losses, self.seconds, observed, self.options.enable_mem_log
        )
        if self.options.datasets:
            columns = np.column_stack(list(scores.values()))
            groups = [prompt_set.metrics for prompt_set in run.prompt_sets]
            metrics |= set_metrics(columns, list(scores), rollouts.datasets, groups)
        self._log_epoch(metrics)
        self._require_training(has_trained=self.state.optimizer_steps > steps_before)

    def fit(self) -> None:
        """Run to the end, or to a ``TrainingStopped``: a signal, missing rewards, a NaN."""
        run = self.run
        checkpoints = run.checkpoints
        try:
            load_state(run)
            self.evaluations.best.find_again()
            if self.accelerator.is_main_process:
                record_start(run)
            named_at_end = self.evaluations.best.named_at_end()
            with self.signals.listening(), named_at_end, resumable(checkpoints, self.signals):
                run.references.start()
                if run.probe:
                    # Before the first epoch, because it is done once and is no part of training.
                    with self._reading_images():
                        run.probe.load()
                    run.probe.prepare()
                while not self._finished():
                    self.evaluations.evaluate_if_due()
                    self.epoch()
                    if self.options.save_freq and self.state.epoch % self.options.save_freq == 0:
                        checkpoints.save_epoch()
                    if any_process(self.accelerator, self._signaled()):
                        raise Stopped
                self.evaluations.evaluate_if_due(finished=True)
                checkpoints.save_epoch()
                verify_run(run)
            self.accelerator.end_training()
            logger.info("finished after %d epochs: %s", self.state.epoch, run.folder)
        except TrainingStopped as stopped:
            if self.accelerator.is_main_process:  # every process stops for the same reason
                logger.error("stopped: %s", stopped)
            raise
        finally:
            run.close()

    def _finished(self) -> bool:
        limit = self.options.max_train_minutes
        over = limit is not None and self.state.train_seconds >= 60 * limit
        # Clocks differ between processes, so one process's clock decides for all.
        over = any_process(self.accelerator, over and self.accelerator.is_main_process)
        return over or self.state.epoch >= self.options.num_epochs

    def _signaled(self) -> bool:
        return self.signals.received is not None

    def _begin(self) -> None:
        self.epochs_begun += 1
        self.seconds = defaultdict(float)
        self.started = time.perf_counter()
        self.observer = SampleObserver()
        self.run.seed_generators()

    def _end(self) -> None:
        # Time that people take counts in no limit and no forecast.
        people_wait = self.seconds.get("people_wait", 0.0)
        self.seconds["epoch"] = time.perf_counter() - self.started - people_wait
        self.state.train_seconds += self.seconds["epoch"]
        self.state.epoch += 1
        self.state.between_epochs = True

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Generator[None]:
        started = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - started

    def _sample(self, queue: ScoreQueue) -> Rollouts:
        """Sample this process's images, each scored in the background as soon as it is decoded."""
        run = self.run
        policy = self.state.policy
        adapter = run.objective.sampling_snapshot(self.state.optimizer_steps)
        sampled_weights = contextlib.nullcontext()
        if adapter:
            sampled_weights = lora.using_adapter(policy, adapter)
        processes = self.accelerator.num_processes
        shown = progress(
            "sampling",
            run.plan.samples_per_process,
            self.accelerator.is_main_process,
            processes,
        )
        num_sampled = 0
        run.follow("sampling", 0, run.plan.samples)

        def deliver(
            images: list[Image.Image | None],
            items: list[Item],
            numbers: list[int],
            seeds: Sequence[int],
        ) -> None:
            nonlocal num_sampled
            queue.submit(images, items, numbers, seeds)
            self.observer.add(images, numbers)
            finish(len(images))
            num_sampled += len(images)
            run.follow("sampling", num_sampled * processes, run.plan.samples)

        def should_stop() -> bool:
            return self._signaled() or queue.failed() or run.references.failed()

        try:
            with self._timed("sample"):
                with self._reading_images():
                    items = run.sampler.load()
                with sampled_weights, shown as finish, self.state.strategy.same_outcome():
                    return run.sampler.sample(deliver, should_stop, items)
        except Stopped:
            if any_process(self.accelerator, self._signaled()):
                raise
            # A bad image has been found, or a reward has failed; these raise the error.
            if any_process(self.accelerator, run.references.failed()):
                run.references.finish(self._signaled)
            self._scores(queue)
            raise

    @contextlib.contextmanager
    def _reading_images(self) -> Generator[None]:
        """A bad image that one process reads inside ends all of them; no forward is inside."""
        with self.run.references.all_named(self._signaled), same_outcome(self.accelerator):
            yield

    def _scores(self, queue: ScoreQueue) -> dict[str, np.ndarray]:
        """Scores of all N images of the epoch by position, (N,) each; NaN = missing."""
        scores = queue.gathered(self.accelerator, self.run.plan.samples, self._signaled)
        self.seconds["reward_wait"] = queue.wait_seconds
        if self._rewards_of_people():
            self.seconds["people_wait"] = queue.people_seconds
        return {name: scores[:, column] for column, name in enumerate(queue.rewards)}

    def _rewards_of_people(self) -> list[str]:
        """Names of the rewards that people give."""
        rewards = self.run.rewards.train
        return [name for name, reward in rewards.items() if reward.asks_people]

    def _advantages(self, scores: Mapping[str, np.ndarray], rollouts: Rollouts) -> AdvantageResult:
        run = self.run
        set_rewards = run.set_rewards
        images = f"the images of epoch {self.state.epoch + 1}"
        people = self._rewards_of_people()
        # What a person skips is absent, as the score of another set's reward is. Only an image that
        # could not be shown lacks a vote.
        was_shown = np.zeros(len(rollouts.item_ids), bool)
        if people:
            was_shown = gather_rows(rollouts.finite[:, None])[:, 0] == 1
        for number, rewards_of_set in enumerate(set_rewards):
            members = rollouts.datasets == number
            lacks_one = np.zeros(members.sum(), bool)
            shares = {}
            for name in rewards_of_set.weights:
                is_missing = np.isnan(scores[name][members])
                if name in people:
                    is_missing &= ~was_shown[members]
                lacks_one |= is_missing
                shares[name] = is_missing.mean()
            of_name = f" of {rewards_of_set.name}" if rewards_of_set.name else ""
            require_scores(lacks_one.mean(), shares, f"{images}{of_name}", self.options.train)
        try:
            return advantages_of_sets(
                scores, rollouts.item_ids, run.train_items, set_rewards, self.options, people
            )
        except ValueError as error:  # from the aggregation, about these scores
            raise StopTraining(
                f"config.train.aggregate_fn failed in epoch {self.state.epoch + 1} ({error})"
            ) from error

    def _observe(self, rollouts: Rollouts, scores: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Signs of collapse: health/… and reward/{within,between,within_minus_between}."""
        run = self.run
        with self._timed("health"):
            latents = [sample.clean_latents for sample in rollouts.samples]
            metrics = self.observer.metrics(latents, rollouts.item_ids)
            with self.state.strategy.same_outcome():
                if run.probe:
                    metrics |= run.probe.measure()
            is_open = [bool(item.metadata.get("open")) for item in run.train_items]
            metrics |= of_epoch(scores, rollouts.item_ids, is_open)
        return metrics

    def _log_epoch(self, metrics: dict[str, float]) -> None:
        epoch = self.state.epoch
        findings = []
        with same_outcome(self.accelerator):
            if self.accelerator.is_main_process:
                rows = [*self.run.metrics.rows("train"), metrics]
                metrics |= signs.against_first(rows)
                findings = signs.judge_epoch(metrics) + signs.judge_scores(rows)
        self.run.log("train", metrics)
        logger.info(
            "epoch %d/%d: %s; %.1f min left",
            epoch,
            self.options.num_epochs,
            epoch_line(metrics),
            self._seconds_left() / 60,
        )
        signs.warn(findings, f"after epoch {epoch}: ")
        collapsed = [finding.message for finding in findings if finding.collapse]
        if self.options.train.stop_on_collapse and any_process(self.accelerator, bool(collapsed)):
            why = collapsed[0] if collapsed else "see the message of the main process"
            raise StopTraining(
                f"config.train.stop_on_collapse: after epoch {epoch}, {why}. An earlier checkpoint "
                "may be better"
            )

    def _require_training(self, has_trained: bool) -> None:
        """Warn of an epoch in which no image was trained; stop after ``_IDLE_EPOCHS`` in a row."""
        self.idle_epochs = 0 if has_trained else self.idle_epochs + 1
        if has_trained:
            return
        loss_type = self.options.train.loss_type
        why = f"no image was trained: none has an advantage that {loss_type!r} keeps"
        logger.warning("in epoch %d, %s", self.state.epoch, why)
        if self.idle_epochs == _IDLE_EPOCHS:
            raise StopTraining(f"in {_IDLE_EPOCHS} epochs, {why}")

    def _seconds_left(self) -> float:
        """Estimated from the epochs so far."""
        epochs_left = self.options.num_epochs - self.state.epoch
        seconds = self.state.train_seconds / self.state.epoch * epochs_left
        if self.options.max_train_minutes is None:
            return seconds
        allowed = 60 * self.options.max_train_minutes - self.state.train_seconds
        return max(0.0, min(seconds, allowed))
