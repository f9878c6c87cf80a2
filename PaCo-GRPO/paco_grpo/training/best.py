"""The best evaluation of a run: whose weights are kept, and linked as ``best`` in its folder."""

import contextlib
import copy
import logging
import math
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from paco_grpo.advantages.groups import AggregateFn, SetRewards, aggregate, weighted_sum
from paco_grpo.data.sets import PromptSet
from paco_grpo.monitoring import signs
from paco_grpo.monitoring.metrics import rewards_line
from paco_grpo.options import RunOptions
from paco_grpo.training.checkpoints import checkpoint_name, epoch_of, list_checkpoints
from paco_grpo.training.model_card import add_evaluation
from paco_grpo.training.run import Run
from paco_judge.files import read_json_lines

logger = logging.getLogger(__name__)

# Metrics of evaluations:
TRAINED_REWARD = "eval/trained_reward"
BEST_EPOCH = "eval/best_epoch"  # of the best evaluation so far

Row = Mapping[str, Any]


def best_evaluation(
    rows: Sequence[Row],
    trained: Mapping[str, Collection[str]],
    saved: Collection[int] | None = None,
) -> Row | None:
    """The evaluation with the highest trained reward; the earliest of equal ones.

    Only evaluations count where no guard has fallen (``signs.judge_evaluation``) and no sign of
    collapse stood in the epoch before (``signs.judge_epoch``). Where there is none, the first
    evaluation is the best.

    Args:
        rows: Of metrics.jsonl.
        trained: What the names of a prompt set's metrics begin with → the rewards it is trained on.
        saved: Epochs whose weights are there; None: of all.

    Returns:
        Its row; None if no evaluation has a trained reward and weights.
    """
    evaluations = [row for row in rows if row["phase"] == "eval"]
    epochs = {row["epoch"]: row for row in rows if row["phase"] == "train"}
    candidates = []
    for number, row in enumerate(evaluations, start=1):
        epoch = dict(epochs.get(row["epoch"], {}))
        epoch |= dict.fromkeys(epoch.get("not_finite", ()), math.nan)
        findings = signs.judge_epoch(epoch)
        for group, names in trained.items():
            findings += signs.judge_evaluation(evaluations[:number], names, group)
        if not findings:
            candidates.append(row)
    known = []
    for row in candidates or evaluations[:1]:
        if TRAINED_REWARD in row and (saved is None or row["epoch"] in saved):
            known.append(row)
    return max(known, key=lambda row: row[TRAINED_REWARD], default=None)


class BestEvaluation:
    """Keeps the weights of the best evaluation of ``run`` and names it in the log."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def rate(self, metrics: Row) -> dict[str, float]:
        """The trained reward of a new evaluation and the epoch of the best one, if there are any.

        Its row is not in metrics.jsonl yet.
        """
        row: dict[str, Any] = {"phase": "eval", "epoch": self.run.state.epoch, **metrics}
        rows = [*self.run.metrics.rows(), row]
        self._measure(rows, [row])
        best = self._find(rows)
        if best is not None:
            row[BEST_EPOCH] = best["epoch"]
        return {name: row[name] for name in (TRAINED_REWARD, BEST_EPOCH) if name in row}

    def keep(self, epoch: int | None) -> None:
        """Keep the weights after ``epoch``, those of the best evaluation, and link them as ``best``.

        They are saved if they are the current ones; a collective operation. The weights before
        training are not: they are the base model, or ``train.lora_path``.
        """
        run = self.run
        is_new = epoch == run.state.epoch
        if is_new and run.state.epoch > 0:
            run.checkpoints.save_epoch()
        if run.accelerator.is_main_process:
            self._mark(epoch)
            if is_new or epoch is None:
                logger.info("%s", self._describe())

    def find_again(self) -> None:
        """Find the best of the evaluations before the run was resumed, if it was.

        Their trained rewards are measured again: their weights may be others now.
        """
        run = self.run
        if run.accelerator.is_main_process:
            rows = run.metrics.rows()
            evaluations = [row for row in rows if row["phase"] == "eval"]
            self._measure(rows, evaluations)
            best = self._find(rows)
            epoch = None if best is None else best["epoch"]
            if evaluations:
                evaluations[-1].pop(BEST_EPOCH, None)
                if best is not None:
                    evaluations[-1][BEST_EPOCH] = epoch
                run.metrics.replace(rows)
            self._mark(epoch)
        run.accelerator.wait_for_everyone()

    def _mark(self, epoch: int | None) -> None:
        """Link the checkpoint after ``epoch`` as ``best``, ready to be handed over.

        The evaluation's numbers and images are put beside its weights.
        """
        run = self.run
        run.checkpoints.mark_best(epoch)
        name = checkpoint_name(epoch or 0)
        checkpoint = run.checkpoints.root / name
        if epoch is None or not checkpoint.is_dir():
            return
        rows = run.metrics.rows("eval")
        row = next(row for row in rows if row["epoch"] == epoch)
        sentence = (
            f"After {epoch} epochs, {row['eval/num_images']} images at "
            f"{run.options.test.resolution} px: {rewards_line(row, 'eval/')}."
        )
        if rows[0]["epoch"] == 0:
            sentence += f" Before training: {rewards_line(rows[0], 'eval/')}."
        sheet = run.folder / "eval" / name / "sheet.png"
        try:
            for folder in (checkpoint / "diffusers", checkpoint / "transformer"):
                if folder.is_dir():
                    add_evaluation(folder, sentence, sheet)
        except OSError as error:
            logger.warning("%s: the evaluation cannot be put beside it: %s", checkpoint, error)

    @contextlib.contextmanager
    def named_at_end(self) -> Generator[None]:
        """However the block ends, the log then names the best evaluation and its checkpoint."""
        try:
            yield
        finally:
            if self.run.accelerator.is_main_process:
                logger.info("%s", self._describe())

    def _measure(self, rows: Sequence[Row], evaluations: Iterable[dict[str, Any]]) -> None:
        """Set the trained reward of these among ``rows``, where their images' scores are there."""
        run = self.run
        files = {}
        for row in rows:
            file = run.folder / "eval" / checkpoint_name(row["epoch"]) / "eval_data.jsonl"
            if row["phase"] == "eval" and file.is_file():
                files[row["epoch"]] = file
        for row in evaluations:
            epoch = row["epoch"]
            if epoch not in files:
                continue
            row.pop(TRAINED_REWARD, None)
            images = read_json_lines(files[epoch])
            first = read_json_lines(next(iter(files.values())))
            try:
                value = trained_reward(images, first, run.prompt_sets, run.set_rewards, run.options)
            except Exception as error:  # noqa: BLE001 - the aggregation may be the user's
                logger.warning(
                    "config.train.aggregate_fn failed on the images of the evaluation after epoch "
                    "%d (%s: %s), which therefore cannot be the best",
                    epoch,
                    type(error).__name__,
                    error,
                )
                continue
            if value is not None:
                row[TRAINED_REWARD] = value

    def _find(self, rows: Sequence[Row]) -> Row | None:
        """The best evaluation whose weights are there or can still be saved."""
        run = self.run
        saved = {0, run.state.epoch}
        for path in list_checkpoints(run.checkpoints.root):
            saved.add(epoch_of(path))
        trained = {}
        for prompt_set, rewards_of_set in zip(run.prompt_sets, run.set_rewards, strict=True):
            trained[prompt_set.metrics] = list(rewards_of_set.weights)
        return best_evaluation(rows, trained, saved)

    def _describe(self) -> str:
        run = self.run
        row = self._find(run.metrics.rows())
        if row is None and not run.metrics.rows("eval"):
            return "nothing was evaluated, so no checkpoint is the best"
        if row is None:
            return "no evaluation measures a trained reward, so no checkpoint is the best"
        epoch = row["epoch"]
        folder = f"{run.checkpoints.link} -> checkpoints/{checkpoint_name(epoch)}"
        place = folder if epoch else "the weights before training"
        reward = row[TRAINED_REWARD]
        return f"best evaluation: after epoch {epoch}, trained reward {reward:.4f}; {place}"


def trained_reward(
    images: Sequence[Row],
    first: Sequence[Row],
    prompt_sets: Sequence[PromptSet],
    set_rewards: Sequence[SetRewards],
    options: RunOptions,
) -> float | None:
    """The number that training raises, measured on the images of an evaluation; None if it has none.

    An image's rewards are weighted and aggregated as in training, and the mean is taken over the
    images that have all of them. Rewards without any score in the first evaluation are left out:
    the evaluation does not have them, or its prompts have one image each and the reward compares
    several.

    Some numbers have a meaning only among the images of one batch. Statistics of the run's first
    evaluation take their place, so that evaluations can be compared: where training divides rewards
    by their spread (``returns_advantages``, ``train.rank_grpo``) or prompt sets by theirs, it is
    the spread there, and ``log_tame_aggregate_fn`` tames what it would tame there.

    Args:
        images: Rows of its eval_data.jsonl.
        first: Those of the first evaluation.
        prompt_sets, set_rewards, options: Of the run.
    """
    values = []
    shares = []
    for prompt_set, rewards_of_set in zip(prompt_sets, set_rewards, strict=True):
        first_of_set = _rows_of(first, prompt_set.name)
        names = []
        for reward in rewards_of_set.weights:
            if any(row["rewards"].get(reward) is not None for row in first_of_set):
                names.append(reward)
        if not names:
            continue
        function = _comparable(rewards_of_set, _scores(first_of_set, names), options)
        totals = _totals(_rows_of(images, prompt_set.name), names, function, options)
        if np.isnan(totals).all():
            return None
        value = np.nanmean(totals)
        if len(prompt_sets) > 1:
            value /= _spread(_totals(first_of_set, names, function, options))
        values.append(value)
        shares.append(prompt_set.share)
    return float(np.average(values, weights=shares)) if values else None


def _comparable(
    rewards_of_set: SetRewards, first: Mapping[str, np.ndarray], options: RunOptions
) -> AggregateFn:
    """The aggregation of a prompt set with the statistics of the ``first`` evaluation's scores."""
    # A copy: one that keeps a state must not see the images of evaluations.
    function = copy.deepcopy(rewards_of_set.aggregate_fn)
    if getattr(function, "returns_advantages", False) or options.train.rank_grpo:
        weights = getattr(function, "reward_weights", None) or rewards_of_set.weights
        by_spread = {name: weights[name] / _spread(scores) for name, scores in first.items()}
        return partial(weighted_sum, by_spread)
    as_for = getattr(function, "as_for", None)
    return as_for(first) if as_for else function


def _totals(
    rows: Sequence[Row], names: Sequence[str], function: AggregateFn, options: RunOptions
) -> np.ndarray:
    item_ids = np.array([row["item_id"] for row in rows])
    prompts = [row["prompt"] for row in rows]
    return aggregate(_scores(rows, names), item_ids, prompts, function, options)


def _rows_of(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row.get("dataset", "") == name]


def _scores(rows: Sequence[Row], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Name → (images,) float64, NaN = missing."""
    return {name: np.array([row["rewards"].get(name) for row in rows], float) for name in names}


def _spread(values: np.ndarray) -> float:
    """The standard deviation of what is there; 1 where nothing varies."""
    values = values[~np.isnan(values)]
    return float(values.std()) if np.ptp(values) > 0 else 1.0
