"""Every option of a run, each declared once: type, range, default and meaning.

Options are never changed after parsing; ``dataclasses.replace`` makes a changed copy, which is
validated again.
"""

import dataclasses
import os
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, JsonValue
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


Count = Annotated[int, Field(ge=1, lt=2**31)]
Amount = Annotated[int, Field(ge=1, le=100_000)]  # of what takes memory or time
Whole = Annotated[int, Field(ge=0, lt=2**31)]
Pixels = Annotated[int, Field(ge=1, le=16384)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


def _as_steps(value: object) -> object:
    """``1,2``, ``(1, 2)`` and ``[1, 2]`` of a command line, or one number, are lists too."""
    if isinstance(value, str):
        return re.findall(r"[^\s,()\[\]]+", value)
    return [value] if isinstance(value, int) else value


def _as_names(value: object) -> object:
    """A comma between names makes a list; in another text it belongs to a regular expression."""
    names = value.split(",") if isinstance(value, str) else ()
    if len(names) > 1 and all(re.fullmatch(r"[\w.]+", name) for name in names):
        return names
    return value


Place = Annotated[str, AfterValidator(os.path.expanduser)]  # shells leave the ~ of --a=~/b to us
Steps = Annotated[tuple[Whole, ...], BeforeValidator(_as_steps)]
Names = Annotated[tuple[str, ...], Field(min_length=1)]
Table = BeforeValidator(lambda value: value or {})  # YAML reads an empty table as None
SetName = Annotated[str, Field(pattern=r"^[\w-]+$")]  # part of the names of metrics
Weights = Annotated[dict[str, float], Table]
Arguments = Annotated[dict[str, JsonValue], Table]


def option(default: object, meaning: str, **extra: Any) -> Any:
    """A field with its default and, for docs/configuration.md, its meaning."""
    if isinstance(default, dict):
        return Field(default_factory=dict, description=meaning, **extra)
    return Field(default=default, description=meaning, **extra)


def beyond_paper(default: object, meaning: str) -> Any:
    """An option that is not among the published ones; the page marks it."""
    return option(default, meaning, json_schema_extra={"beyond_paper": True})


@dataclass(frozen=True, config=_STRICT)
class PretrainedOptions:
    """The model that is trained."""

    model: Place = option("black-forest-labs/FLUX.1-dev", "diffusers folder or hub name")
    policy: str | None = beyond_paper(
        None,
        "class that drives the model: generic, or package.module:Class; None: by the pipeline that "
        "model_index.json names",
    )
    quantize: Literal["nf4"] | None = beyond_paper(
        None, "frozen transformer in 4 bits; changes the numbers"
    )


@dataclass(frozen=True, config=_STRICT)
class SampleOptions:
    """How training images are sampled, and how many."""

    num_steps: Amount = option(10, "denoising steps")
    noise_steps: Steps = option((1,), "step indices at which noise is injected, from 0")
    num_noise_steps: Amount | None = option(
        None, "number of noise steps drawn at random each epoch; None: all"
    )
    window_epochs: Amount | None = beyond_paper(
        None, "epochs in which num_noise_steps neighbors are the noise steps; None: drawn"
    )
    window_stride: Amount = beyond_paper(1, "noise steps that the window of neighbors moves on")
    noise_level: NonNegative = option(0.7, "noise level a")
    transition: str = beyond_paper(
        "flow_sde", "noise step: flow_sde, cps, dance_sde or package.module:function"
    )
    guidance_scale: NonNegative | None = option(
        3.5,
        "embedded guidance (FLUX) or scale of true CFG; None: the pipeline's default, with its "
        "negative prompt",
    )
    negative_prompt: str | None = option(
        None, "negative prompt of true CFG (a space is enough); None: no true CFG"
    )
    same_latent: bool = option(False, "shared initial noise of a prompt's images")
    latents_per_prompt: Amount = beyond_paper(
        1, "different initial noises per prompt, with same_latent"
    )
    global_std: bool = option(False, "advantages divided by the standard deviation over all images")
    batch_size: Amount = option(1, "images per process and forward")
    num_images_per_prompt: Amount = option(16, "k, images of each prompt (size of a group)")
    unique_sample_num_per_epoch: Amount = option(
        42, "m, prompts per epoch; raised until m·k divides evenly"
    )
    reward_batch_size: Amount = option(8, "images per call of a local reward")
    tail_steps: Amount | None = beyond_paper(
        None, "second-order steps after the last noise step; None: the schedule's"
    )


@dataclass(frozen=True, config=_STRICT)
class TrainOptions:
    """Objective, optimizer, adapter and rewards."""

    resolution: Pixels = option(
        512, "side in pixels of a square training image; other shapes keep its area"
    )
    batch_size: Amount = option(1, "images per process and forward; does not change the numbers")
    max_sequence_length: Whole | None = beyond_paper(
        None,
        "text tokens of training images; 0 = the longest prompt, up to a multiple of 64; None: "
        "config.max_sequence_length",
    )
    loss_type: str = option(
        "ppo",
        "objective: ppo, guard_grpo or nft; beyond the paper flow_dppo, awm, dgpo, dpo, crd, opd "
        "or package.module:name",
    )
    loss_kwargs: Arguments = beyond_paper({}, "{argument: value} of an objective of your own")
    learning_rate: NonNegative = option(3e-4, "AdamW learning rate")
    adam_beta1: Decay = option(0.9, "AdamW decay of the first moment")
    adam_beta2: Decay = option(0.999, "AdamW decay of the second moment")
    adam_weight_decay: NonNegative = option(1e-4, "AdamW decoupled weight decay")
    adam_epsilon: Positive = option(1e-8, "AdamW term added to the root of the second moment")
    use_8bit_adam: bool = option(False, "AdamW state in 8 bits (bitsandbytes)")
    sharding: Literal["fsdp2"] | None = beyond_paper(None, "transformer sharded over processes")
    max_grad_norm: Positive = option(1.0, "largest norm of the gradients")
    num_inner_epochs: Amount = option(1, "passes over the samples of an epoch")
    gradient_step_per_epoch: Amount | None = option(
        None, "optimizer steps per pass over the samples; None: 2 (nft, awm, dgpo, dpo: 1)"
    )
    timesteps: Steps | None = option(
        None, "step indices to train on; None: the epoch's noise steps"
    )
    num_sigmas: Amount | None = beyond_paper(
        None,
        "σ values per pass over the samples; None: awm 6, dgpo, crd 4, dpo 1, nft its noise steps",
    )
    sigma_fraction: Annotated[Positive, Field(le=1)] = beyond_paper(
        0.9, "noisy share of the schedule that σ values come from"
    )
    sigma_one: bool = beyond_paper(False, "σ = 1 among the trained σ values")
    clip_range: NonNegative = option(1e-4, "clipping range of the ratio around 1 (ppo, guard_grpo)")
    adv_clip_max: Positive = option(5.0, "largest absolute advantage")
    beta: NonNegative = option(0.0, "weight of the KL term against the reference")
    nft_beta: Positive = option(1.0, "β of nft: distance of v⁺ and v⁻ from the old velocity")
    decay_type: Annotated[Whole, Field(le=2)] = option(1, "schedule of nft's old adapter")
    awm_clip_range: NonNegative = beyond_paper(1.0, "clipping range of awm's ratio around 1")
    awm_slow_beta: NonNegative = beyond_paper(
        1.0, "weight of awm's distance to a slow copy of the adapter"
    )
    dgpo_beta: Positive = beyond_paper(
        100.0, "β of dgpo; larger: correctly ranked groups lose weight sooner"
    )
    dgpo_reference: Literal["base", "slow"] = beyond_paper(
        "base", "dgpo's reference: base = as train.reference, or the slow copy"
    )
    dgpo_clip_range: Positive | None = beyond_paper(
        1e-2, "distance from the slow copy at which dgpo masks; None: never"
    )
    dpo_beta: Positive = beyond_paper(100.0, "β of dpo; larger: won pairs lose weight sooner")
    crd_beta: Positive = beyond_paper(1.0, "β of crd: scale of its implicit reward")
    opd_teachers: Annotated[dict[SetName, Place], Table] = beyond_paper(
        {}, "{prompt set, or any name for a single one: adapter to learn from} of opd"
    )
    dppo_divergence: Positive = beyond_paper(
        1e-5, "τ of flow_dppo: mean divergence above which a step must move back"
    )
    old_log_prob: Literal["auto", "rollout", "recompute"] = beyond_paper(
        "auto",
        "source of the old log-probabilities; auto: recomputed if the first ratio is far from 1",
    )
    ema: bool = option(True, "averaged weights (EMA) in evaluations and saved adapters")
    ema_decay: Decay = option(
        0.9, "decay of the averaged weights: min((1+s)/(10+s), this) at step s"
    )
    ema_update_interval: Count = option(
        1, "optimizer steps between updates of the averaged weights"
    )
    lora_rank: Amount = option(64, "rank of the adapter")
    lora_alpha: Count = option(128, "scale of the adapter: lora_alpha / lora_rank")
    lora_targets: Annotated[str | Names, BeforeValidator(_as_names)] = option(
        "default", "layers with a LoRA: default, attention, names or a regular expression"
    )
    lora_path: Place | None = option(None, "adapter to start from: checkpoint, folder or hub name")
    reference: Literal["base", "start"] = beyond_paper(
        "base",
        "reference of KL term and health probe: base model or, with start, lora_path's adapter",
    )
    rank_grpo: bool = option(False, "rewards replaced by their rank within the group")
    max_missing_reward_fraction: Share = beyond_paper(
        0.1, "share of missing scores above which the run saves and stops"
    )
    stop_on_collapse: bool = beyond_paper(
        False, "save and stop at a sign of collapse instead of a warning"
    )
    reward_fn: Weights = option({}, "{name or package.module:factory: weight}; 0 = monitored only")
    reward_fn_kwargs: Annotated[dict[str, Arguments], Table] = option(
        {}, "{name: {argument: value}} of the rewards"
    )
    aggregate_fn: str | dict[str, JsonValue] | Callable[..., Any] | None = option(
        None,
        'name, {"name": …, "arguments": {…}}, package.module:function or function; '
        "None: weighted sum",
    )


@dataclass(frozen=True, config=_STRICT)
class TestOptions:
    """Evaluation on the test items, without noise."""

    __test__ = False  # not a test class of pytest

    resolution: Pixels = option(
        1024, "side in pixels of a square image; other shapes keep its area"
    )
    batch_size: Amount = option(1, "images per process and forward")
    num_steps: Annotated[int, Field(ge=0, le=100_000)] = option(
        20, "denoising steps; 0: the pipeline's default"
    )
    num_images: Count | None = beyond_paper(
        None,
        "images per evaluation, one of each test item in turn, several if there are fewer items; "
        "None: one of each",
    )
    seed: Seed | None = option(None, "seed of the initial noise; None: config.seed")
    save_eval_images: bool = option(True, "every image saved, not only the contact sheet")
    reward_fn: Weights = option({}, "rewards of the evaluation; empty: as in training")
    reward_fn_kwargs: Annotated[dict[str, Arguments], Table] = option(
        {}, "all arguments of a reward, in place of train's; other rewards keep theirs"
    )


@dataclass(frozen=True, config=_STRICT)
class HealthOptions:
    """Signs of collapse; their limits are in monitoring/health.py."""

    probe_images: Whole = beyond_paper(
        4, "test items that measure the distance to the reference; 0: off"
    )


@dataclass(frozen=True, config=_STRICT)
class SpeedOptions:
    """How the same numbers are computed faster.

    What changes them, if only by rounding, is off by default.
    """

    compile: bool = beyond_paper(
        False, "torch.compile of the transformer's blocks; slow first epoch"
    )
    attention: str | None = beyond_paper(
        None, "attention backend of diffusers, such as flash; None: its default"
    )
    offload_text: bool | None = beyond_paper(
        None,
        "text encoders in main memory between uses; None: if they leave less than half of the GPU's "
        "memory free",
    )
    offload_vae: bool = beyond_paper(False, "VAE in main memory between uses")


@dataclass(frozen=True, config=_STRICT)
class DatasetOptions:
    """One of several prompt sets in one run (docs/rewards.md), an entry of ``config.datasets``."""

    folder: Place = Field(min_length=1, description="folder of the prompt set")
    prompt_fn: str | None = beyond_paper(None, "its kind; None: as config.prompt_fn")
    open: bool | None = beyond_paper(
        None, "only its open prompts (true) or the others (false); None: all"
    )
    share: Positive = beyond_paper(1.0, "part of an epoch's prompts, relative to other shares")
    reward_fn: Weights = beyond_paper({}, "rewards of its images; empty: as config.train")
    test_reward_fn: Weights = beyond_paper(
        {}, "rewards of its test items; empty: as config.test, or as its training"
    )
    reward_fn_kwargs: Annotated[dict[str, Arguments], Table] = beyond_paper(
        {}, "all arguments of a reward, in place of train's and test's; other rewards keep theirs"
    )


@dataclass(frozen=True, config=_STRICT)
class RunOptions:
    """All options of a run."""

    project_name: str = option("PaCo-RL", "project in wandb, swanlab or trackio")
    run_name: str = option("", "folder in save_dir; empty: name and time")
    seed: Seed = option(42, "seed of samples, noise, shuffling and the adapter")
    save_dir: Place = option("runs", "folder that holds the folders of runs")
    save_freq: Whole = option(
        10, "epochs between checkpoints; 0 = only at the end and after the best evaluations"
    )
    eval_freq: Whole = option(
        10, "epochs between evaluations, the first before training; 0 = only at the end"
    )
    num_checkpoint_limit: Count = option(
        5, "newest checkpoints that are kept, besides the one of the best evaluation"
    )
    resume_from: Place | None = option(None, "checkpoint to resume from: latest, or a path")
    resume_changed: bool = beyond_paper(
        False, "resume with another model, prompt set, adapter, judge, objective or seed"
    )
    num_epochs: Whole = option(1000, "epochs; one epoch samples, scores and updates")
    max_train_minutes: NonNegative | None = beyond_paper(
        None, "minutes of training epochs, then stop; None: no limit"
    )
    logging_platform: Literal["tensorboard", "wandb", "swanlab", "trackio", "none"] = option(
        "tensorboard", "tracker of metrics"
    )
    enable_mem_log: bool = option(False, "peak memory of every epoch in the log")

    dataset: Place = option("", "folder of the prompt set")
    datasets: Annotated[dict[SetName, DatasetOptions], Table] = beyond_paper(
        {}, "several prompt sets in place of one: {name: {folder, share, reward_fn, …}}"
    )
    prompt_fn: str = option(
        "geneval",
        "kind of prompt set: geneval, general_ocr, text, geneval_image, arrow_editing or "
        "package.module:function",
    )
    item_size: Literal["exact", "aspect"] = option(
        "exact", "items' height and width: exact, or only their aspect"
    )
    max_sequence_length: Whole | None = option(
        512,
        "text tokens; 0 = the longest prompt, up to a multiple of 64; None: the pipeline's default",
    )

    mixed_precision: Literal["bf16", "no"] = option("bf16", "precision of forwards")
    allow_tf32: bool = option(True, "TF32 in float32 matrix products on the GPU")
    use_lora: bool = option(True, "LoRA adapter; False: the whole transformer is trained")
    enable_gradient_checkpointing: bool = option(
        False, "activations recomputed in the backward pass: less memory, slower"
    )
    per_prompt_stat_tracking: bool = option(True, "advantages relative to the group of a prompt")

    pretrained: PretrainedOptions = Field(default_factory=PretrainedOptions)
    sample: SampleOptions = Field(default_factory=SampleOptions)
    train: TrainOptions = Field(default_factory=TrainOptions)
    test: TestOptions = Field(default_factory=TestOptions)
    health: HealthOptions = Field(default_factory=HealthOptions)
    speed: SpeedOptions = Field(default_factory=SpeedOptions)


GROUPS: dict[str, type] = {}
OPTIONS: dict[str, FieldInfo] = {}  # those without a group first
SET_OPTIONS: dict[str, FieldInfo] = {}
for _name, _field in RunOptions.__pydantic_fields__.items():
    if dataclasses.is_dataclass(_field.annotation):
        GROUPS[_name] = _field.annotation
    else:
        OPTIONS[_name] = _field
for _group, _kind in GROUPS.items():
    for _name, _field in _kind.__pydantic_fields__.items():
        OPTIONS[f"{_group}.{_name}"] = _field
for _name, _field in DatasetOptions.__pydantic_fields__.items():
    SET_OPTIONS[f"datasets.NAME.{_name}"] = _field
