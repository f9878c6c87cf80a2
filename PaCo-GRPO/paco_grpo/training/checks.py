"""Checks before weights are loaded: mistakes that otherwise end, or spoil, a run after hours."""

import importlib.util
import logging
import math
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from operator import attrgetter

import torch

from paco_grpo.advantages.aggregation import describe, own_weights
from paco_grpo.data.sets import divide, prompt_sets
from paco_grpo.estimate import table
from paco_grpo.names import did_you_mean
from paco_grpo.objectives import OBJECTIVES, Objective, create_objective, get_objective
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.policies import PolicyLoadError, fewest_steps, policy_class, size_multiple
from paco_grpo.policies.adapters import find_lora, objective_adapter
from paco_grpo.policies.loading import is_step_distilled
from paco_grpo.policies.speed import attention_problem
from paco_grpo.rewards.registry import REWARDS, reward_weights, short_name
from paco_grpo.sampling.denoise import transition_problem
from paco_grpo.types import Item
from paco_judge.client import DEFAULT_MODEL
from paco_judge.errors import UserError

logger = logging.getLogger(__name__)

_ADDRESS = ("server", "base_url", "host", "port")  # arguments of rewards
FEW_STEPS = 8  # the most steps that a model distilled to few steps takes


def check_run(options: RunOptions) -> None:
    """Refuse options that contradict each other, the objective, the rewards or the model."""
    train = options.train
    problems = contradictions(options)
    for name in ("train.use_8bit_adam", "pretrained.quantize"):
        value = attrgetter(name)(options)
        if value and importlib.util.find_spec("bitsandbytes") is None:
            problems.append(
                f"{name}={value!r} needs bitsandbytes: pip install 'paco-grpo[quantize]'"
            )
    if options.speed.attention is not None:
        problem = attention_problem(options.speed.attention)
        if problem:
            problems.append(f"speed.attention={problem}")
    objective = None
    try:
        describe(train.aggregate_fn)
        problems += get_objective(train.loss_type).check(options)
        objective = create_objective(options)
    except ValueError as error:
        problems.append(str(error).removeprefix("config."))
    if objective and not options.use_lora and (objective.snapshots or objective.adapters):
        problems.append(
            f"use_lora=False cannot be used with train.loss_type={train.loss_type!r}: "
            "its old policy, or its teacher, is an adapter"
        )
    if objective and not problems:
        problem = noise_step_problem(options, objective)
        problems += [problem] if problem else []
    try:
        problems += model_problems(options)
    except PolicyLoadError as error:
        problems.append(str(error).removeprefix("config."))
    if objective is None or problems:
        raise ConfigError("\n".join(f"config.{problem}" for problem in problems))
    for warning in questionable(options, objective):
        logger.warning("config.%s", warning)


def noise_step_problem(options: RunOptions, objective: Objective) -> str | None:
    """The first epoch in which ``train.timesteps`` allows none of the noise steps, in a line."""
    train = options.train
    chooses_itself = type(objective).steps is not Objective.steps
    if train.timesteps is None or chooses_itself or not objective.needs_noise_steps:
        return None
    for epoch in range(options.num_epochs):
        steps = list(objective.noise_steps(epoch))
        if not set(steps).intersection(train.timesteps):
            return (
                f"train.timesteps={train.timesteps} has no step of {train.loss_type!r} in epoch "
                f"{epoch + 1}: noise_steps({epoch}) returns {steps}"
            )
    return None


def check_adapters(options: RunOptions) -> None:
    """Raise a PolicyLoadError for an adapter that training needs, and that is not there."""
    if options.train.lora_path is not None:
        find_lora(options.train.lora_path)
    for name, place in create_objective(options).adapters.items():
        find_lora(place, objective_adapter(name))


def questionable(options: RunOptions, objective: Objective) -> list[str]:
    """A line for what is possible and probably not meant, beginning with an option's name."""
    sample = options.sample
    train = options.train
    test = options.test
    warnings = []
    if sample.num_images_per_prompt == 1 and options.per_prompt_stat_tracking:
        warnings.append(
            "sample.num_images_per_prompt=1: "
            "images of different prompts are compared with each other"
        )
    # An evaluation asks nobody for votes, so it cannot have them.
    others = [name for name in train.reward_fn if short_name(name) != "votes"]
    if others and test.reward_fn and test.reward_fn.keys().isdisjoint(others):
        warnings.append(
            f"test.reward_fn has {', '.join(test.reward_fn)}, and none that is trained: "
            "--config.test.reward_fn= evaluates the trained rewards"
        )
    own = own_weights(train.aggregate_fn)
    for prompt_set in prompt_sets(options):
        if own is None:
            break
        weights = reward_weights(prompt_set.train.weights)
        trained = {name: weight for name, weight in weights.items() if weight}
        used = own or dict.fromkeys(trained, abs(min(trained.values())))
        if any(used.get(name) != weight for name, weight in trained.items()):
            warnings.append(
                f"train.aggregate_fn={describe(train.aggregate_fn)}: "
                f"the weights {dict(prompt_set.train.weights)} do not count"
            )
    warnings += replaced_places(options)
    # Embedded guidance is on unless its scale is 0.
    is_guided = (sample.guidance_scale or 0) > 1 or sample.negative_prompt is not None
    looks_distilled = test.num_steps <= FEW_STEPS and not is_guided
    is_distilled = looks_distilled or is_step_distilled(options.pretrained.model)
    if is_distilled and not objective.needs_noise_steps:
        others = [name for name in OBJECTIVES if get_objective(name).needs_noise_steps]
        warnings.append(
            f"train.loss_type={train.loss_type!r}: {options.pretrained.model} seems to be "
            "distilled to few steps. This objective trains σ values that such a model never sees, "
            "so images blur and training may collapse. "
            f"Use {', '.join(others)}, or the model that is not distilled"
        )
    return warnings


def replaced_places(options: RunOptions) -> list[str]:
    """A line for each reward whose arguments in ``test`` or a set leave out which model answers.

    They replace all arguments that it has elsewhere, not only those of the same name.
    """
    train = options.train.reward_fn_kwargs
    test = options.test.reward_fn_kwargs
    tables = [("test", test, train)]
    for name, set_options in options.datasets.items():
        tables.append((f"datasets.{name}", set_options.reward_fn_kwargs, train | test))
    lines = []
    for option, kwargs, elsewhere in tables:
        for name, arguments in kwargs.items():
            before = elsewhere.get(name, {})
            lost = [word for word in _ADDRESS if before.get(word)]
            if "model" not in arguments and before.get("model") not in (None, DEFAULT_MODEL):
                lost.append("model")
            # Another server has a model of its own.
            if lost and arguments.keys().isdisjoint(_ADDRESS):
                lines.append(
                    f"{option}.reward_fn_kwargs.{name} replaces all arguments of {name}, also "
                    f"{', '.join(lost)}: repeat what is to stay"
                )
    return lines


def contradictions(options: RunOptions) -> list[str]:
    """A line for each contradiction, beginning with an option's name."""
    sample = options.sample
    train = options.train
    problems = []
    if not options.dataset and not options.datasets:
        problems.append("dataset is empty; give the folder of the prompt set")
    if options.datasets:
        problems += set_problems(options)
    elif not any(train.reward_fn.values()):
        problems.append(
            "train.reward_fn gives no reward a weight, such as "
            "--config.train.reward_fn.jpeg_compressibility=1"
        )
    if options.resume_from == "latest" and not options.run_name:
        problems.append("resume_from=latest needs run_name, the run's folder in config.save_dir")
    group = sample.num_images_per_prompt
    if group % sample.latents_per_prompt:
        problems.append(
            f"sample.latents_per_prompt={sample.latents_per_prompt} does not divide the {group} "
            "images of a group"
        )
    last = sample.num_steps - 1
    noise_steps = sample.noise_steps if sample.noise_level else ()
    if max(sample.noise_steps, default=0) > last:
        problems.append(
            f"sample.noise_steps={sample.noise_steps}: with sample.num_steps={sample.num_steps}, "
            f"steps are 0 to {last}"
        )
        noise_steps = ()
    problem = transition_problem(
        sample.transition, sample.num_steps, noise_steps, sample.noise_level
    )
    if problem:
        problems.append(f"sample.transition={problem}")
    if sample.transition == "cps" and sample.noise_level > 1:
        problems.append(
            f"sample.noise_level={sample.noise_level:g}: sample.transition='cps' takes at most 1"
        )
    distinct = len(set(sample.noise_steps))
    if sample.num_noise_steps is not None and sample.num_noise_steps > distinct:
        problems.append(
            f"sample.num_noise_steps={sample.num_noise_steps} is more than the {distinct} steps of "
            "sample.noise_steps"
        )
    if sample.window_epochs is not None and sample.num_noise_steps is None:
        problems.append(
            f"sample.window_epochs={sample.window_epochs} needs sample.num_noise_steps, the "
            "length of the window"
        )
    if train.timesteps == ():
        problems.append("train.timesteps is empty; None trains on every noise step")
    if train.reference == "start" and train.lora_path is None:
        problems.append("train.reference='start' needs train.lora_path")
    if train.lora_path is not None and not options.use_lora:
        problems.append("train.lora_path needs use_lora=True")
    if train.beta > 0 and not options.use_lora:
        problems.append(
            "use_lora=False cannot be used with train.beta > 0: "
            "the reference is the model without its adapter"
        )
    is_quantized = options.pretrained.quantize is not None
    if is_quantized and not options.use_lora:
        problems.append(
            "pretrained.quantize needs use_lora=True: quantized weights cannot be trained"
        )
    if is_quantized and options.speed.compile:
        problems.append("speed.compile is not supported with pretrained.quantize")
    rewards = {**train.reward_fn, **options.test.reward_fn}
    for set_options in options.datasets.values():
        rewards |= {**set_options.reward_fn, **set_options.test_reward_fn}
    problems += argument_problems("train", train.reward_fn_kwargs, rewards)
    problems += argument_problems("test", options.test.reward_fn_kwargs, rewards)
    return problems


def argument_problems(where: str, kwargs: Iterable[str], rewards: Mapping[str, float]) -> list[str]:
    """A line for each name in ``kwargs`` that is unknown or a misspelt one of ``rewards``.

    Arguments of rewards that a run does not use are ignored: a command line may replace the rewards
    of a configuration.
    """
    problems = []
    for name in kwargs:
        if name in rewards or name in REWARDS:
            continue
        meant = did_you_mean(name, rewards)
        if meant or ":" not in name:
            problems.append(
                f"{where}.reward_fn_kwargs has {name!r}, which is not a reward of this run.{meant}"
            )
    return problems


def set_problems(options: RunOptions) -> list[str]:
    """What is wrong with ``config.datasets``, as ``contradictions``."""
    problems = []
    if options.dataset:
        problems.append(
            f"dataset={options.dataset!r} and datasets are both given; "
            "set config.dataset='' or config.datasets={}"
        )
    sets = prompt_sets(options)
    prompts = options.sample.unique_sample_num_per_epoch
    prompts_of_sets = divide(prompts, [prompt_set.share for prompt_set in sets])
    for prompt_set, count in zip(sets, prompts_of_sets, strict=True):
        where = f"datasets.{prompt_set.name}"
        if count == 0:
            problems.append(
                f"{where}.share={prompt_set.share:g} gives the set none of the {prompts} prompts "
                "of an epoch; raise it, or sample.unique_sample_num_per_epoch"
            )
        if not any(prompt_set.train.weights.values()):
            problems.append(f"{where}.reward_fn gives no reward a weight")
        kwargs = options.datasets[prompt_set.name].reward_fn_kwargs
        rewards = {**prompt_set.train.weights, **prompt_set.test.weights}
        problems += argument_problems(where, kwargs, rewards)
    num_images = options.test.num_images
    if num_images is not None and num_images < len(sets):
        problems.append(
            f"test.num_images={num_images} is less than one image of each of {len(sets)} datasets"
        )
    return problems


def model_problems(options: RunOptions) -> list[str]:
    """What the model cannot do; only its small configuration files are read."""
    model = options.pretrained.model
    multiple = size_multiple(options.pretrained)
    fewest = fewest_steps(model)
    problems = []
    for name, steps in (("sample", options.sample.num_steps), ("test", options.test.num_steps)):
        if steps < fewest:
            problems.append(
                f"{name}.num_steps={steps} must be at least {fewest}: "
                f"{model}'s schedule ends above σ = 0"
            )
    for name, side in (("train", options.train.resolution), ("test", options.test.resolution)):
        if side % multiple:
            problems.append(
                f"{name}.resolution={side} is not a multiple of {multiple}, as {model} needs"
            )
    return problems


def warn_of_small_gpu(options: RunOptions, device: torch.device) -> None:
    """Log which suffix fits on the GPU, if a configuration with these settings does not."""
    needed = table.gib_needed(options)
    gib = gpu_gib(device)
    if needed is not None and needed > gib:
        logger.warning(
            "this GPU has %.1f GiB, and the run needs %.1f by estimate: %s",
            gib,
            needed,
            table.advice(options, gib, needed),
        )


def out_of_memory(options: RunOptions, error: torch.OutOfMemoryError) -> str:
    """What helps when a GPU is full, with the values of the options."""
    helps = []
    for name in table.BATCHES:
        size = attrgetter(name)(options)
        if size > 1:
            helps.append(f"lower config.{name}={size}")
    if not options.enable_gradient_checkpointing:
        helps.append("set config.enable_gradient_checkpointing=True")
    suffix = table.smaller_suffix(options, gpu_gib(None), table.gib_needed(options))
    if suffix:
        helps.append(f"use the configuration with the suffix {suffix}")
    helps.append(
        f"lower config.train.resolution={options.train.resolution} or "
        f"config.test.resolution={options.test.resolution}"
    )
    reason = str(error).partition(". ")[0]
    return f"the GPU has too little memory ({reason}): {', '.join(helps)}"


def gpu_gib(device: torch.device | None) -> float:
    """The memory of a GPU in GiB (None: of this process's); of another device, infinite."""
    if not torch.cuda.is_available() or (device and device.type != "cuda"):
        return math.inf
    return torch.cuda.get_device_properties(device).total_memory / table.GIB


def require_promised_gpu(environment: Mapping[str, str]) -> None:
    """Refuse a machine whose GPUs torch does not see, often because of an old driver.

    ``ACCELERATE_USE_CPU`` allows it.
    """
    wants_cpu = environment.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    if torch.cuda.is_available() or wants_cpu:
        return
    hides_all = environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hides_all or not shutil.which("nvidia-smi"):
        return
    listed = subprocess.run(["nvidia-smi", "-L"], check=False, capture_output=True, text=True)
    if "GPU " in listed.stdout:
        raise ConfigError(
            f"nvidia-smi lists GPUs, but torch {torch.__version__} sees none. Check "
            "CUDA_VISIBLE_DEVICES, update the driver, or install a torch for it. To use the CPU, "
            "set ACCELERATE_USE_CPU=true"
        )


def check_items(options: RunOptions, splits: Mapping[str, list[Item]]) -> None:
    """Raise a ``UserError`` for items that the generator cannot take.

    An editor's items have reference images, others' have none.
    """
    model = options.pretrained.model
    policy = policy_class(options.pretrained)
    for split, items in splits.items():
        where = f"the {split} items"
        counts = [item.num_references for item in items]
        problem = None
        if policy.needs_image and not min(counts):
            problem = (
                f"edits images, but {where} have none: give config.prompt_fn=geneval_image, or "
                "--image to generate.py"
            )
        elif max(counts) and not policy.edits_images:
            problem = f"generates from text alone, but {where} have reference images"
        elif max(counts) > 1 and not policy.several_images:
            problem = f"edits one image, but {where} have several"
        if problem:
            raise UserError(f"config.pretrained.model={model} {problem}")
