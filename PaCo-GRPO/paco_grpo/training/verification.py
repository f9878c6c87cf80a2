"""The comparison of a run's last checkpoint with plain diffusers."""

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import diffusers
import numpy as np
import torch
from PIL import Image
from typing_extensions import override

from paco_grpo.options import RunOptions
from paco_grpo.policies import lora
from paco_grpo.policies.diffusers_policy import DiffusersPolicy, on_white
from paco_grpo.sampling.denoise import Draws, Sampling, rollout
from paco_grpo.sampling.images import at_size
from paco_grpo.training import checkpoints
from paco_grpo.training.model_card import add_check
from paco_grpo.training.run import Run
from paco_grpo.types import Item

logger = logging.getLogger(__name__)

_SEED = 0  # of the initial noise of a comparison


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

    @override
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
def _loaded_beside(policy: DiffusersPolicy, folder: Path) -> Generator[None]:
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
    draws = Draws([item.item_id], [_SEED], *item.size)
    record = rollout(policy, conditioning, draws, Sampling(num_steps))
    (image,) = policy.decode(record.clean_latents, *item.size)
    return image


def _pipeline_image(policy: DiffusersPolicy, item: Item, num_steps: int) -> Image.Image:
    """Of diffusers' own loop, with the policy's weights in the precision of training."""
    with policy.whole_pipeline(item) as pipe, policy.autocast():
        pipe.set_progress_bar_config(disable=True)
        result = pipe(  # pyright: ignore[reportCallIssue] - each pipeline defines its own
            **policy.pipeline_arguments(item),
            **policy.noise_arguments(_SEED, item),
            num_inference_steps=num_steps,
        )
    return on_white(result[0][0])


def _mean_difference(a: Image.Image, b: Image.Image) -> float:
    difference = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    return float(np.abs(difference).mean())
