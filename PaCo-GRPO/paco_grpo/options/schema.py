"""Every option of a run, each declared once: type, default, meaning and range.

The field names are the names that users type (``config.train.learning_rate`` is ``RunOptions.train.learning_rate``).
Options are never changed after parsing; ``dataclasses.replace`` makes a changed copy. What follows from other values
(batches per epoch, accumulation) is computed later, from the real number of processes.
"""
# ruff: noqa: RUF009  (option() returns a dataclass field)

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


def option(
    default: Any,
    meaning: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple = (),
) -> Any:
    """A dataclass field that is an option: its default, one line on its meaning, and the values it takes.

    Choices that other modules own (objectives, prompt sets, trackers, kinds of quantization) are checked by them.
    """
    limits = {"at_least": at_least, "at_most": at_most, "above": above, "below": below}
    metadata = {"meaning": meaning, "choices": choices, **limits}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class PretrainedOptions:
    """The model that is trained."""

    model: str = option("black-forest-labs/FLUX.1-dev", "diffusers folder or hub name")
    quantize: str | None = option(None, "nf4 or int8: quantize the frozen transformer; changes the numbers")
    image_positions: str = option(
        "mrope",
        "of image tokens in Qwen-Image-Edit's text encoder; stock = as the installed pipeline computes them",
        choices=("mrope", "stock"),
    )


@dataclass(frozen=True)
class SampleOptions:
    """How training images are sampled, and how many.

    The steps after the last noise step enter no log-probability, only the image, so ``tail_*`` may approximate them.
    """

    num_steps: int = option(10, "denoising steps", at_least=1)
    noise_steps: tuple[int, ...] = option((1,), "step indices at which noise is injected, from 0")
    num_noise_steps: int | None = option(None, "this many of them, chosen at random each epoch; None = all", at_least=1)
    noise_level: float = option(0.7, "a of Flow-SDE or of Flow-CPS (where 1 is all noise)", at_least=0)
    cps: bool = option(False, "Flow-CPS instead of Flow-SDE")
    guidance_scale: float = option(3.5, "embedded guidance (FLUX), or the scale of true CFG", at_least=0)
    negative_prompt: str | None = option(None, "turns on true CFG (with guidance_scale > 1); a space is enough")
    same_latent: bool = option(False, "images of a prompt share their initial noise, whose first steps are computed once")
    latents_per_prompt: int = option(1, "with same_latent: different initial noises per prompt, each for as many images", at_least=1)
    merge_lora: bool | None = option(
        None, "merge the LoRA into the base for steps without noise; None = in float32 on a CPU, where that only rounds"
    )
    global_std: bool = option(False, "divide advantages by the standard deviation over all images")
    batch_size: int = option(1, "images per process and forward; 0 = as many as fit into memory", at_least=0)
    num_images_per_prompt: int = option(16, "k, images of each prompt (the size of a group)", at_least=1)
    unique_sample_num_per_epoch: int = option(42, "m, prompts per epoch; raised until m·k divides evenly", at_least=1)
    reward_batch_size: int | None = option(None, "images per call of a reward; None = a sampling batch", at_least=1)
    tail_steps: int | None = option(None, "steps after the last noise step; None = those of the schedule", at_least=1)
    tail_order: int = option(1, "their order: 1 = Euler, 2 = Adams-Bashforth", choices=(1, 2))
    tail_cache: float = option(0.0, "threshold of the first-block cache in them (0.05 to 0.2); 0 = off", at_least=0)
    tail_weights: str | None = option(
        None, "int8 = 8-bit copies of the large layers in them (bitsandbytes)", choices=(None, "int8")
    )


@dataclass(frozen=True)
class TrainOptions:
    """Objective, optimizer, adapter and rewards."""

    resolution: int = option(512, "side in pixels of a square training image; other shapes keep its area", at_least=1)
    batch_size: int = option(1, "images per process and forward; does not change the numbers", at_least=1)
    loss_type: str = option("ppo", "objective: ppo, guard_grpo, flow_dppo, nft, awm or dgpo")
    learning_rate: float = option(3e-4, "of AdamW, after the warm-up", at_least=0)
    lr_warmup_steps: int = option(0, "optimizer steps of linear warm-up", at_least=0)
    adam_beta1: float = option(0.9, "AdamW: decay of the first moment", at_least=0, below=1)
    adam_beta2: float = option(0.999, "AdamW: decay of the second moment", at_least=0, below=1)
    adam_weight_decay: float = option(1e-4, "AdamW: decoupled weight decay, times the learning rate", at_least=0)
    adam_epsilon: float = option(1e-8, "AdamW: added to the root of the second moment", above=0)
    use_8bit_adam: bool = option(False, "keep AdamW's state in 8 bits (bitsandbytes)")
    sharding: str | None = option(
        None, "fsdp2 = shard the transformer over processes; None = as accelerate was started", choices=(None, "fsdp2")
    )
    max_grad_norm: float = option(1.0, "gradients are scaled down to this norm", above=0)
    num_inner_epochs: int = option(1, "passes over the samples of an epoch", at_least=1)
    gradient_step_per_epoch: int | None = option(None, "optimizer steps per inner epoch; None = 2 (nft, awm, dgpo: 1)", at_least=1)
    timesteps: tuple[int, ...] | None = option(None, "step indices to train on; None = the epoch's noise steps")
    num_sigmas: int | None = option(
        None, "σ an epoch of nft, awm and dgpo, spread over the schedule; None = awm 6, dgpo 4, nft its noise steps", at_least=1
    )
    sigma_fraction: float = option(0.9, "share of the schedule, from its noisy end, that they come from", above=0, at_most=1)
    sigma_one: bool = option(False, "σ = 1 is among them")
    clip_range: float = option(1e-4, "the ratio is clipped to 1 ± this (ppo, guard_grpo)", at_least=0)
    adv_clip_max: float = option(5.0, "advantages are clipped to ± this", above=0)
    beta: float = option(0.0, "weight of the KL term against the base model", at_least=0)
    nft_beta: float = option(1.0, "β of nft: how far v⁺ and v⁻ lie from the old velocity", above=0)
    decay_type: int | None = option(None, "schedule of nft's old adapter; None = 1", choices=(None, 0, 1, 2))
    awm_weighting: str = option(
        "ghuber", "of awm's matching error e at σ: e, σe, σ²e, σ√e or 4σe^¼", choices=("uniform", "t", "t2", "huber", "ghuber")
    )
    awm_clip_range: float = option(1.0, "awm's ratio is clipped to 1 ± this", at_least=0)
    awm_slow_beta: float = option(1.0, "awm: weight of the distance to a slow copy of the adapter; 0 = none", at_least=0)
    dgpo_beta: float = option(100.0, "β of dgpo: how soon a group that is in order stops counting", above=0)
    dgpo_reference: str = option(
        "base",
        "of dgpo's group: the base model, the base model with true CFG (images are then sampled without), or a slow copy",
        choices=("base", "guided", "slow"),
    )
    dgpo_clip_range: float | None = option(
        1e-2, "dgpo masks samples that moved further than this from the slow copy; None = never", above=0
    )
    dppo_divergence: float = option(1e-5, "τ of flow_dppo: mean divergence above which a step must move back", above=0)
    old_log_prob: str = option(
        "auto",
        "where they come from; auto = recomputed if the first ratio is too far from 1",
        choices=("auto", "rollout", "recompute"),
    )
    ema: bool = option(True, "average the trained weights; evaluation and saved adapters use the average")
    ema_decay: float = option(0.9, "its decay at optimizer step s is min((1+s)/(10+s), this)", at_least=0, below=1)
    ema_update_interval: int = option(8, "optimizer steps between updates of the average", at_least=1)
    lora_rank: int = option(64, "rank of the adapter", at_least=1)
    lora_alpha: int = option(128, "the adapter is scaled by lora_alpha / lora_rank", above=0)
    lora_targets: str | tuple[str, ...] = option(
        "default", "layers with a LoRA: default, attention, names (ends of module names) or a regular expression"
    )
    lora_path: str | None = option(None, "adapter to start from: folder or hub name, in PEFT or diffusers format")
    best_and_worst: int | None = option(
        None, "images of each group that are trained on: the best half and the worst half of them; None = all", at_least=2
    )
    rank_grpo: bool = option(False, "replace rewards by their rank within the group")
    max_missing_reward_fraction: float = option(
        0.1, "of an epoch's images; above it the run saves and stops", at_least=0, at_most=1
    )
    stop_on_collapse: bool = option(False, "save and stop at a sign of collapse (see health); False = only warn")
    watch_test_rewards: bool = option(False, "also score every epoch's samples with the rewards that only the test has")
    reward_fn: dict[str, float] = option({}, "{name or package.module:factory: weight}; 0 = monitored only")
    reward_fn_kwargs: dict[str, dict[str, Any]] = option({}, "{name: {argument: value}} of the rewards")
    aggregate_fn: Any = option(None, "name, package.module:function or function; None = weighted sum")
    aggregate_fn_kwargs: dict[str, Any] = option({}, "arguments of a built-in aggregate_fn, such as threshold")


@dataclass(frozen=True)
class TestOptions:
    """Evaluation on the test items, without noise."""

    __test__ = False  # not a test class of pytest

    resolution: int = option(1024, "side in pixels of a square image; other shapes keep its area", at_least=1)
    batch_size: int = option(1, "images per process and forward", at_least=1)
    num_steps: int = option(20, "denoising steps", at_least=1)
    at_start: bool = option(True, "evaluate before the first update")
    num_images: int | None = option(None, "number of test items; None = all of them", at_least=1)
    seed: int | None = option(None, "of the initial noise; None = config.seed", at_least=0)
    save_eval_images: bool = option(True, "save every image; False = only the contact sheet")
    reward_fn: dict[str, float] = option({}, "as in train; empty = the rewards of train")
    reward_fn_kwargs: dict[str, dict[str, Any]] = option({}, "as in train; a name that is not here has those of train")


@dataclass(frozen=True)
class HealthOptions:
    """Limits beyond which an epoch is reported as a sign of collapse."""

    probe_images: int = option(4, "test items to measure the distance to the base model on; 0 = off", at_least=0)
    max_velocity_change: float = option(0.75, "of their velocity, relative to the base model's", at_least=0)
    max_contrast_change: float = option(2.0, "factor against the first epoch; also of latents", at_least=1)
    max_detail_change: float = option(3.0, "factor against the first epoch", at_least=1)
    max_brightness_change: float = option(0.25, "difference from the first epoch, on a scale of 0 to 1", at_least=0)
    min_distinctness: float = option(0.25, "differences within groups, relative to the first epoch's", at_least=0)
    max_gradient_spike: float = option(20.0, "gradient norm, relative to its median", at_least=1)
    max_clip_share: float = option(0.95, "of ratios, after an epoch's first optimizer step", at_least=0)
    max_zero_std_share: float = option(0.8, "share of groups whose rewards are all equal", at_least=0)
    max_reward_divergence: float = option(
        3.0, "trained reward up, evaluation-only reward down; in standard errors", at_least=0
    )


@dataclass(frozen=True)
class SpeedOptions:
    """How the same numbers are computed faster. What changes them, if only by rounding, is off by default."""

    compile: bool = option(False, "torch.compile of the transformer's blocks; equal up to rounding, slow first epoch")
    attention: str | None = option(None, "attention backend of diffusers, such as _native_cudnn; None = its default")
    fused_adam: bool | None = option(None, "one kernel for a whole AdamW step; None = on CUDA")
    offload_text_encoders: bool | None = option(None, "keep text encoders in main memory between uses; None = on CUDA")
    offload_vae: bool = option(False, "keep the VAE in main memory between uses")
    overlap_decode: bool | None = option(None, "decode a batch while the next one is sampled; None = on CUDA")


@dataclass(frozen=True)
class RunOptions:
    """All options of a run."""

    project_name: str = option("PaCo-RL", "project in wandb or swanlab")
    run_name: str = option("", "folder of the run in save_dir; empty = configuration name, date and time")
    seed: int = option(42, "of samples, noise, shuffling and the adapter's initialization", at_least=0)
    save_dir: str = option("runs", "folder that holds the folders of runs")
    save_freq: int = option(10, "epochs between checkpoints; 0 = only at the end", at_least=0)
    eval_freq: int = option(10, "epochs between evaluations; 0 = only at the end", at_least=0)
    num_checkpoint_limit: int = option(5, "checkpoints that are kept, the newest", at_least=1)
    resume_from: str | None = option(None, "checkpoint to resume from: latest, or a path")
    num_epochs: int = option(1000, "epochs; one epoch samples, scores and updates", at_least=0)
    max_train_minutes: float | None = option(None, "of training epochs, then stop; None = no limit", at_least=0)
    logging_platform: str = option("tensorboard", "wandb, swanlab, tensorboard or none")
    enable_mem_log: bool = option(False, "log the peak memory of every epoch")

    dataset: str = option("", "folder of the prompt set")
    prompt_fn: str = option("geneval", "kind of prompt set: geneval, general_ocr, text, geneval_image or arrow_editing")
    item_size: str = option(
        "exact",
        "exact = items' height and width; aspect = only their shape, with the resolution's area",
        choices=("exact", "aspect"),
    )
    max_sequence_length: int = option(512, "text tokens; 0 = the longest prompt, up to a multiple of 64", at_least=0)

    mixed_precision: str = option("bf16", "precision of forwards", choices=("bf16", "no"))
    allow_tf32: bool = option(True, "TF32 in float32 matrix products on the GPU")
    use_lora: bool = option(True, "train a LoRA adapter; False = the whole transformer")
    enable_gradient_checkpointing: bool = option(False, "less memory for one more forward in training")
    per_prompt_stat_tracking: bool = option(True, "advantages relative to the group of a prompt")
    num_threads: int | None = option(None, "CPU threads per process; None = cores / processes", at_least=1)

    pretrained: PretrainedOptions = field(default_factory=PretrainedOptions)
    sample: SampleOptions = field(default_factory=SampleOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    test: TestOptions = field(default_factory=TestOptions)
    health: HealthOptions = field(default_factory=HealthOptions)
    speed: SpeedOptions = field(default_factory=SpeedOptions)


@dataclass(frozen=True)
class Option:
    """One option as ``RunOptions`` declares it.

    Attributes:
        name: Dotted name, such as ``train.learning_rate``.
        kind: int, float, bool, str, tuple (of integers), list (a text or names), dict (a table with the user's keys) or
            object (a function).
        nullable: Whether it can be None.
    """

    name: str
    kind: type
    nullable: bool
    default: Any
    meaning: str
    at_least: float | None
    at_most: float | None
    above: float | None
    below: float | None
    choices: tuple


def _declared(group: type, prefix: str = "") -> Iterator[Option]:
    hints = typing.get_type_hints(group)
    for declared in dataclasses.fields(group):
        hint = hints[declared.name]
        if dataclasses.is_dataclass(hint):
            yield from _declared(hint, f"{declared.name}.")
            continue
        kind = typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint  # X of X | None
        kind = object if kind is Any else typing.get_origin(kind) or kind
        kind = list if hint == str | tuple[str, ...] else kind
        default = {} if declared.default is dataclasses.MISSING else declared.default
        yield Option(prefix + declared.name, kind, default is None, default, **declared.metadata)


OPTIONS: dict[str, Option] = {declared.name: declared for declared in _declared(RunOptions)}
GROUPS: dict[str, type] = {
    f.name: typing.get_type_hints(RunOptions)[f.name] for f in dataclasses.fields(RunOptions) if f.name not in OPTIONS
}
