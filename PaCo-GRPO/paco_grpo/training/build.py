"""Everything a run is made of, built in the order in which mistakes are cheapest to find."""

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from paco_grpo.advantages.aggregation import (
    AggregateFn,
    describe,
    get_aggregate_fn,
    weighted_sum,
)
from paco_grpo.checkpoint import files
from paco_grpo.checkpoint.state import Checkpoints
from paco_grpo.data.prompts import load_prompts
from paco_grpo.data.sampler import GroupSampler
from paco_grpo.distributed.fsdp2 import start_processes
from paco_grpo.distributed.processes import Strategy, main_decides
from paco_grpo.monitoring.observe import ReferenceProbe
from paco_grpo.monitoring.trackers import MetricsFile, Tracker, finite_numbers
from paco_grpo.objectives import Objective
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.options.parse import options_to_dict, options_to_yaml
from paco_grpo.options.schema import TrainOptions
from paco_grpo.policies import Policy, PolicyLoadError, PolicySettings, load_policy
from paco_grpo.policies.adapters import add_lora, find_lora
from paco_grpo.policies.loading import text_length
from paco_grpo.policies.lora import START, add_snapshot, lora_parameters
from paco_grpo.policies.speed import compile_blocks, set_attention
from paco_grpo.rewards.registry import (
    CheckedReward,
    Reward,
    find_problems,
    reward_weights,
    short_name,
    write_records,
)
from paco_grpo.training import checks
from paco_grpo.training.resume import Earlier, find_earlier
from paco_grpo.training.state import EMA, Plan, TrainState, describe_evaluations, make_plan
from paco_grpo.training.update import Updater
from paco_grpo.types import Item, Stream
from paco_judge.errors import UserError
from paco_judge.files import write_atomically

logger = logging.getLogger(__name__)

# What a command reports in one line.
USER_ERRORS = (PolicyLoadError, UserError)


@dataclass(frozen=True)
class RewardSets:
    """The rewards of a run by short name."""

    train: Mapping[str, Reward]
    test: Mapping[str, Reward]
    # Of the training rewards; those with weight 0 are monitored and not in it.
    weights: Mapping[str, float]
    aggregate_fn: AggregateFn


@dataclass
class Run:
    """The parts of a run."""

    options: RunOptions
    plan: Plan
    folder: Path
    earlier: Earlier
    objective: Objective
    train_items: list[Item]
    test_items: list[Item]
    rewards: RewardSets
    state: TrainState
    updater: Updater
    checkpoints: Checkpoints
    probe: ReferenceProbe | None
    metrics: MetricsFile
    tracker: Tracker | None  # on the main process
    claimed: files.RunFolder  # ``folder``, which no other trainer can use until it is released

    @property
    def accelerator(self) -> Accelerator:
        """The processes."""
        return self.state.strategy.accelerator

    def seed_generators(self) -> None:
        """Seed the global generators, which nothing of ours uses, but a user's reward may."""
        process = self.accelerator.process_index
        words = [Stream.GLOBAL, self.options.seed, self.state.epoch, process]
        set_seed(int(np.random.SeedSequence(words).generate_state(1)[0]))

    def log(self, phase: str, metrics: Mapping[str, float]) -> None:
        """Append a row to metrics.jsonl and log it to the tracker (main process)."""
        state = self.state
        if self.accelerator.is_main_process:
            head = {
                "epoch": state.epoch,
                "step": state.optimizer_steps,
                "train_time": state.train_seconds,
                "phase": phase,
            }
            self.metrics.write(head | dict(metrics))
            self.tracker.log(finite_numbers(metrics), state.epoch)
        self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """Close the tracker, and let another trainer have the folder."""
        with contextlib.closing(self.tracker) if self.tracker else contextlib.nullcontext():
            self.claimed.release()


def build_run(options: RunOptions, configuration_name: str = "run") -> Run:
    """Check the options and claim the run's folder; then build its parts.

    Without ``config.run_name``, the run is named by ``configuration_name`` and the main process's
    clock.

    Raises:
        UserError: The run cannot begin; the message says why.
    """
    objective = checks.check_run(options)
    strategy = start_processes(options)
    name = options.run_name or f"{configuration_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    name = main_decides(strategy.accelerator, lambda: name)
    claimed = files.RunFolder(Path(options.save_dir).expanduser().absolute() / name)
    main_decides(strategy.accelerator, claimed.claim)
    with contextlib.ExitStack() as on_error:
        on_error.callback(claimed.release, remove_if_unused=True)
        described = describe(options.train.aggregate_fn)  # a function has no place in config.yaml
        train = dataclasses.replace(options.train, aggregate_fn=described)
        options = dataclasses.replace(options, run_name=name, train=train)
        try:
            run = _build(options, objective, strategy, claimed)
        except torch.OutOfMemoryError as error:
            raise ConfigError(checks.out_of_memory(options, error)) from error
        on_error.pop_all()
    return run


def _build(
    options: RunOptions, objective: Objective, strategy: Strategy, claimed: files.RunFolder
) -> Run:
    """The parts of a run, in the order in which mistakes are cheapest to find."""
    accelerator = strategy.accelerator
    folder = claimed.path

    # Prompts, an earlier run, rewards that have answered, and the tracker.
    train_items = load_prompts(options.dataset, "train", options.prompt_fn)
    test_items = load_prompts(options.dataset, "test", options.prompt_fn)
    items = {"train": train_items, "test": test_items}
    earlier = main_decides(accelerator, lambda: find_earlier(options, folder))
    checks.check_items(options, items)
    main_decides(accelerator, lambda: checks.check_references(items))
    num_tokens = text_length(options, [*train_items, *test_items])
    options = dataclasses.replace(options, max_sequence_length=num_tokens)
    rewards = _reward_sets(options, accelerator, folder, items)
    tracker = None
    if accelerator.is_main_process:
        tracker = Tracker(
            options.logging_platform,
            folder,
            options.project_name,
            options.run_name,
            options_to_dict(options),
        )

    # The generator with its adapters.
    torch.backends.cuda.matmul.allow_tf32 = options.allow_tf32
    torch.backends.cudnn.allow_tf32 = options.allow_tf32
    policy = load_generator(options, strategy.loading_device)
    add_adapters(policy, options, objective)
    strategy.place(policy)
    apply_speed(options, policy)
    named = policy.transformer.named_parameters()
    parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
    snapshots = {}
    for snapshot in objective.snapshots:
        snapshots[snapshot.name] = lora_parameters(policy, snapshot.name)

    # What trains it.
    train = options.train
    plan = make_plan(options, accelerator.num_processes, objective.gradient_steps)
    state = TrainState(
        policy=policy,
        parameters=parameters,
        snapshots=snapshots,
        ema=EMA(parameters, train.ema_decay, train.ema_update_interval) if train.ema else None,
        optimizer=_optimizer(train, list(parameters.values())),
        strategy=strategy,
        sampler=GroupSampler(
            len(train_items),
            plan.prompts,
            plan.images_per_prompt,
            options.seed,
            options.sample.latents_per_prompt,
        ),
    )
    # Without LoRA there is no base model left to compare with.
    probe_items = test_items[: options.health.probe_images] if options.use_lora else []
    run = Run(
        options=options,
        plan=plan,
        folder=folder,
        earlier=earlier,
        objective=objective,
        train_items=train_items,
        test_items=test_items,
        rewards=rewards,
        state=state,
        updater=Updater(state, objective, options, plan.gradient_steps),
        checkpoints=Checkpoints(folder, options, state),
        probe=ReferenceProbe(policy, probe_items, options) if probe_items else None,
        metrics=MetricsFile(folder / "metrics.jsonl"),
        tracker=tracker,
        claimed=claimed,
    )
    if accelerator.is_main_process:
        _record_start(run)
    return run


def evaluation_reward_kwargs(options: RunOptions) -> dict[str, dict[str, Any]]:
    """Name → arguments of each test reward; what ``test`` leaves out is as in training."""
    names = options.test.reward_fn or options.train.reward_fn
    arguments = options.train.reward_fn_kwargs | options.test.reward_fn_kwargs
    return {name: arguments.get(name, {}) for name in names}


def _reward_sets(
    options: RunOptions, accelerator: Accelerator, folder: Path, items: Mapping[str, Sequence[Item]]
) -> RewardSets:
    """Build all rewards and check each: does the judge answer, can every item be scored?"""
    train = options.train
    weights = {name: weight for name, weight in reward_weights(train.reward_fn).items() if weight}
    try:
        aggregate_fn = get_aggregate_fn(train.aggregate_fn, weights, options.sample.global_std)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    aggregate_fn = aggregate_fn or partial(weighted_sum, weights)
    reward_weights(options.test.reward_fn)  # no two of one name
    built: dict[str, Reward] = {}  # the same one for training and test is loaded once

    def build(arguments: Mapping[str, Mapping[str, Any]]) -> dict[str, Reward]:
        rewards = {}
        for name, kwargs in arguments.items():
            identity = f"{name} {json.dumps(kwargs, sort_keys=True, default=str)}"
            if identity not in built:
                built[identity] = CheckedReward(name, kwargs, accelerator.device)
            rewards[short_name(name)] = built[identity]
        return rewards

    trained = build({name: train.reward_fn_kwargs.get(name, {}) for name in train.reward_fn})
    tested = build(evaluation_reward_kwargs(options))
    uses = [(reward, items["train"]) for reward in trained.values()]
    uses += [(reward, items["test"]) for reward in tested.values()]
    problems = find_problems(uses)
    if "between_images" in weights and not any(
        item.metadata.get("open") for item in items["train"]
    ):
        problems.append(
            "config.train.reward_fn has between_images, but no training prompt of "
            f"{options.dataset} is open; `python dataset/fetch.py t2is --open_twins` makes open "
            "prompts"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    if accelerator.is_main_process:
        others = {
            f"test {name}": reward
            for name, reward in tested.items()
            if reward is not trained.get(name)
        }
        write_records(trained | others, folder)
    return RewardSets(trained, tested, weights, aggregate_fn)


def load_generator(options: RunOptions, device: torch.device | str) -> Policy:
    """``config.pretrained.model`` in the precision and with the guidance of ``options``."""
    if options.speed.compile and torch.device(device).type == "cuda":
        from paco_judge.compiler import missing_for_compilation

        problem = missing_for_compilation()
        if problem:
            raise ConfigError(f"config.speed.compile=True: {problem}")
    # diffusers warns of each truncated prompt, where we count them once.
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    return load_policy(options.pretrained.model, policy_settings(options, device))


def policy_settings(options: RunOptions, device: torch.device | str) -> PolicySettings:
    """How ``options`` load the generator."""
    return PolicySettings(
        dtype=torch.bfloat16 if options.mixed_precision == "bf16" else torch.float32,
        device=device,
        max_sequence_length=options.max_sequence_length,
        guidance_scale=options.sample.guidance_scale,
        negative_prompt=options.sample.negative_prompt,
        quantize=options.pretrained.quantize,
    )


def find_adapter(place: str | Path, option: str = "--adapter") -> Path:
    """The folder of an adapter: in a checkpoint, in PEFT's or diffusers' format, or on the hub.

    ``option`` is named in errors.
    """
    adapter = Path(place).expanduser() / "adapter"
    return find_lora(adapter if adapter.is_dir() else place, option)


def apply_speed(options: RunOptions, policy: Policy) -> None:
    """Apply ``config.speed`` to a policy that has its adapters and is placed."""
    speed = options.speed
    # PyTorch would choose cuDNN's attention by itself on compute capability 9.0 and 10.0 (H100,
    # B200), whose backward returns NaN for some masked inputs (pytorch#196678). The backend
    # "_native_cudnn" still turns it on for its own calls.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if speed.attention is not None:
        set_attention(policy, speed.attention)
    if speed.compile:
        compile_blocks(policy)
    policy.offload(text_encoders=speed.offload_text, vae=speed.offload_vae)


def add_adapters(policy: Policy, options: RunOptions, objective: Objective) -> None:
    """Attach the trained LoRA and its copies, or make the whole transformer trainable."""
    set_seed(options.seed % 2**32)  # the adapter's gaussian init is the same on every process
    if options.use_lora:
        train = options.train
        add_lora(policy, train.lora_rank, train.lora_alpha, train.lora_targets, train.lora_path)
    else:
        policy.transformer.requires_grad_(True)  # float32 where the strategy places them
    if options.enable_gradient_checkpointing:
        policy.transformer.enable_gradient_checkpointing()
    if options.train.reference == "start":
        add_snapshot(policy, START)
    for snapshot in objective.snapshots:
        add_snapshot(policy, snapshot.name)


def _optimizer(train: TrainOptions, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    kwargs = {
        "lr": train.learning_rate,
        "betas": (train.adam_beta1, train.adam_beta2),
        "weight_decay": train.adam_weight_decay,
        "eps": train.adam_epsilon,
    }
    if train.use_8bit_adam:
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(parameters, **kwargs)
    return torch.optim.AdamW(parameters, fused=parameters[0].device.type == "cuda", **kwargs)


def _record_start(run: Run) -> None:
    """Write config.yaml and plan.json, and log both (main process)."""
    plan = dataclasses.asdict(run.plan)
    device = run.accelerator.device
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else device.type
    plan |= {"device": name, "engine": run.state.strategy.name}
    plan["fingerprints"] = dict(run.earlier.fingerprints)
    texts = {"config.yaml": options_to_yaml(run.options), "plan.json": json.dumps(plan, indent=1)}
    for name, text in texts.items():
        write_atomically(run.folder / name, text)
        logger.info("%s:\n%s", run.folder / name, text)
    logger.info("%s", describe_evaluations(run.options, run.plan, len(run.test_items)))
    for note in run.plan.notes:
        logger.warning("%s", note)
