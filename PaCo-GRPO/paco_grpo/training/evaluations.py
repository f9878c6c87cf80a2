"""The evaluations of a run, and the comparison of its adapter with plain diffusers."""

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import diffusers
import numpy as np
import torch
from PIL import Image

from paco_grpo.distributed import Stopped, main_decides, same_outcome
from paco_grpo.evaluation.evaluate import Evaluation
from paco_grpo.monitoring import health
from paco_grpo.monitoring.metrics import rewards_line
from paco_grpo.monitoring.trackers import Tracker
from paco_grpo.options import RunOptions
from paco_grpo.policies import lora
from paco_grpo.policies.diffusers_policy import DiffusersPolicy, on_white
from paco_grpo.rewards.registry import reward_weights
from paco_grpo.sampling.denoise import Draws, Sampling, rollout
from paco_grpo.sampling.images import at_size
from paco_grpo.training import checkpoints
from paco_grpo.training.best import BEST_EPOCH, BestEvaluation
from paco_grpo.training.build import Run
from paco_grpo.training.model_card import add_check
from paco_grpo.training.resume import require_scores
from paco_grpo.training.state import merges_lora
from paco_grpo.types import Item
from paco_judge.files import read_json_lines
from paco_judge.images import read_image

logger = logging.getLogger(__name__)

_TRACKED_IMAGES = 8
_SEED = 0  # of the initial noise of a comparison


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
        self.best.keep(metrics.get(BEST_EPOCH))

    def _folder(self, epoch: int) -> Path:
        return self.run.folder / "eval" / checkpoints.checkpoint_name(epoch)

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
        for prompt_set, of_set in zip(self.run.prompt_sets, self.run.set_rewards, strict=True):
            for finding in health.judge_evaluation(rows, of_set.weights, prompt_set.metrics):
                logger.warning("%s (%s in metrics.jsonl)", finding.message, finding.sign)


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


# --- plain diffusers ------------------------------------------------------------------------------


def verify_run(run: Run) -> None:
    """Compare the last checkpoint with the averaged weights, where that can be done.

    A problem is a warning, because the run is finished and saved.
    """
    if run.accelerator.is_main_process:
        name = checkpoints.checkpoint_name(run.state.epoch)
        reason = skip_reason(run.options)
        if reason:
            logger.info("the checkpoint is not compared with plain diffusers: %s", reason)
        else:
            _verify_or_warn(run, run.checkpoints.root / name / "diffusers")
    run.accelerator.wait_for_everyone()


def _verify_or_warn(run: Run, folder: Path) -> None:
    logger.info("comparing four images of %s with plain diffusers", folder)
    try:
        with run.state.averaged():
            verification = verify_adapter(run.state.policy, run.options, folder, run.test_items[0])
    except Exception as error:  # noqa: BLE001 - pipelines raise anything
        logger.warning(
            "the saved adapter could not be compared with plain diffusers (%s: %s)",
            type(error).__name__,
            error,
        )
        return
    logger.log(logging.INFO if verification.passed else logging.WARNING, "%s", verification)
    add_check(folder, str(verification))


@dataclass(frozen=True)
class Verification:
    """Mean differences between the pixels of two images, in levels of 255."""

    effect: float  # the trainer's image and the base model's
    difference: float  # the trainer's image and the file's in plain diffusers
    # Plain diffusers with the trained adapter and with the file: without what the pipeline rounds
    # in another way.
    file_error: float

    @property
    def passed(self) -> bool:
        """Whether the file holds what was trained.

        Its error is invisible, or small beside the effect.
        """
        return self.file_error <= max(0.5, self.effect / 10)

    def __str__(self) -> str:
        text = (
            f"Loaded in plain diffusers {diffusers.__version__}, the saved adapter gives the "
            "trainer's image up to "
            f"{self.difference:.2f} of 255 levels on average. The adapter changes that image by "
            f"{self.effect:.2f} levels."
        )
        if self.passed:
            return text
        return (
            f"{text} THE FILE DOES NOT HOLD THE TRAINED WEIGHTS: its image is off by "
            f"{self.file_error:.2f} levels."
        )


def skip_reason(options: RunOptions) -> str | None:
    """Why ``verify_adapter`` cannot compare, None if it can."""
    if not options.use_lora:
        return "config.use_lora is False, so there is no adapter"
    if options.train.sharding == "fsdp2":
        return "the transformer is sharded (config.train.sharding)"
    if options.pretrained.quantize:
        return "the transformer is quantized (config.pretrained.quantize)"
    return None


@torch.no_grad()
def verify_adapter(
    policy: DiffusersPolicy, options: RunOptions, folder: Path, item: Item
) -> Verification:
    """Compare images of ``item`` at test resolution.

    The plain pipeline shares the policy's modules, so this takes the memory of an evaluation and of
    one more adapter: the file is loaded beside the trained adapter by diffusers' own loader, and
    the trained one is switched off.

    Args:
        policy: With the weights that were saved.
        folder: With ``pytorch_lora_weights.safetensors``.
        item: With a reference image, for an editor.
    """
    item = at_size(item, options.test.resolution, options.item_size, policy)
    num_steps = options.test.num_steps
    compiled = torch.compiler.set_stance("force_eager") if options.speed.compile else nullcontext()
    with compiled:
        ours = _own_image(policy, item, num_steps)
        with lora.using_adapter(policy, lora.NO_ADAPTER):
            base = _own_image(policy, item, num_steps)
        plain = _pipeline_image(policy, item, num_steps)
        with _loaded_beside(policy, folder):
            saved = _pipeline_image(policy, item, num_steps)
    return Verification(
        effect=_mean_difference(ours, base),
        difference=_mean_difference(ours, saved),
        file_error=_mean_difference(plain, saved),
    )


@contextmanager
def _loaded_beside(policy: DiffusersPolicy, folder: Path) -> Iterator[None]:
    """The adapter in ``folder``, read by diffusers, instead of the trained one inside the block."""
    # The outer snapshot restores what loading and deleting an adapter switches.
    with warnings.catch_warnings(), lora.using_adapter(policy, lora.TRAINED):
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        warnings.filterwarnings("ignore", message=f"Adapter {lora.SAVED} was active")
        try:
            load_lora_adapter = policy.transformer.load_lora_adapter
            load = getattr(policy.pipeline, "load_lora_weights", load_lora_adapter)
            load(str(folder), adapter_name=lora.SAVED, use_safetensors=True)
            with lora.using_adapter(policy, lora.SAVED):
                yield
        finally:
            if lora.SAVED in policy.transformer.peft_config:
                policy.transformer.delete_adapters(lora.SAVED)


def _own_image(policy: DiffusersPolicy, item: Item, num_steps: int) -> Image.Image:
    conditioning = policy.encode([item])
    draws = Draws([item.item_id], [_SEED], item.height, item.width)
    record = rollout(policy, conditioning, draws, Sampling(num_steps))
    (image,) = policy.decode(record.clean_latents, item.height, item.width)
    return image


def _pipeline_image(policy: DiffusersPolicy, item: Item, num_steps: int) -> Image.Image:
    """Of diffusers' own loop, with the policy's weights in the precision of training."""
    noise = policy.initial_latents([_SEED], item.height, item.width)
    with policy.whole_pipeline(item) as pipe, policy.autocast():
        pipe.set_progress_bar_config(disable=True)
        result = pipe(
            **policy.pipeline_arguments(item),
            num_inference_steps=num_steps,
            latents=policy.pipeline_latents(noise, item),
        )
    return on_white(result.images[0])


def _mean_difference(a: Image.Image, b: Image.Image) -> float:
    difference = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    return float(np.abs(difference).mean())
