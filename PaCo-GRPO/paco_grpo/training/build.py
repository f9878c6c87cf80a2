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

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from paco_grpo.advantages.aggregation import describe, get_aggregate_fn, weighted_sum
from paco_grpo.advantages.groups import SetRewards
from paco_grpo.checkpoint import files
from paco_grpo.checkpoint.state import Checkpoints
from paco_grpo.data.sampler import GroupSampler
from paco_grpo.data.sets import (
    PromptSet,
    RewardTable,
    divide,
    items_in_turn,
    join,
    prompt_sets,
)
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
from paco_grpo.policies.loading import with_text_lengths
from paco_grpo.policies.lora import START, add_snapshot, lora_parameters
from paco_grpo.policies.speed import compile_blocks, set_attention
from paco_grpo.rewards.by_set import merge_sets, require_distinct_names
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
from paco_grpo.training.state import EMA, Plan, TrainState, make_plan
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
    sets: Sequence[SetRewards]  # how each prompt set is trained on them


@dataclass
class Run:
    """The parts of a run."""

    options: RunOptions
    plan: Plan
    folder: Path
    earlier: Earlier
    objective: Objective
    prompt_sets: list[PromptSet]
    train_items: list[Item]  # of all prompt sets
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
        on_error.callback(claimed.release)
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
    sets = prompt_sets(options)
    train_items_of_sets = [prompt_set.load("train") for prompt_set in sets]
    test_items_of_sets = [prompt_set.load("test") for prompt_set in sets]
    train_items = join(train_items_of_sets)
    test_items = join(test_items_of_sets)
    items = {"train": train_items, "test": test_items}
    earlier = main_decides(accelerator, lambda: find_earlier(options, folder))
    checks.check_items(options, items)
    main_decides(accelerator, lambda: checks.check_references(items))
    options = with_text_lengths(options, [*train_items, *test_items])
    items_of_sets = list(zip(train_items_of_sets, test_items_of_sets, strict=True))
    rewards = _reward_sets(options, accelerator, folder, items_of_sets)
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
            [len(of_set) for of_set in train_items_of_sets],
            divide(plan.prompts, [prompt_set.share for prompt_set in sets]),
            plan.images_per_prompt,
            options.seed,
            options.sample.latents_per_prompt,
        ),
    )
    # Without LoRA there is no base model left to compare with.
    num_probes = min(options.health.probe_images, len(test_items)) if options.use_lora else 0
    probe_items = items_in_turn(test_items, num_probes)
    run = Run(
        options=options,
        plan=plan,
        folder=folder,
        earlier=earlier,
        objective=objective,
        prompt_sets=sets,
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


def _reward_sets(
    options: RunOptions,
    accelerator: Accelerator,
    folder: Path,
    items_of_sets: Sequence[tuple[Sequence[Item], Sequence[Item]]],
) -> RewardSets:
    """Build all rewards and check each: does the judge answer, can every item be scored?

    ``items_of_sets``: training and test items of each prompt set.
    """
    sets = prompt_sets(options)
    built: dict[str, CheckedReward] = {}  # the same one for several uses is loaded once
    device = accelerator.device
    trained = []
    tested = []
    set_rewards = []
    problems = []
    require_distinct_names([prompt_set.train for prompt_set in sets])
    require_distinct_names([prompt_set.test for prompt_set in sets])
    for prompt_set, (train_items, test_items) in zip(sets, items_of_sets, strict=True):
        set_rewards.append(_set_rewards(prompt_set, options))
        trained.append(_build_table(prompt_set.train, device, built))
        tested.append(_build_table(prompt_set.test, device, built))
        uses = [(reward, train_items) for reward in trained[-1].values()]
        uses += [(reward, test_items) for reward in tested[-1].values()]
        where = f"config.datasets.{prompt_set.name}: " if prompt_set.name else ""
        problems += [f"{where}{problem}" for problem in find_problems(uses)]
        has_open = any(item.metadata.get("open") for item in train_items)
        if "between_images" in set_rewards[-1].weights and not has_open:
            problems.append(
                f"{where or 'config.train.'}reward_fn has between_images, but no training prompt "
                f"of {prompt_set.folder} is open; `python dataset/fetch.py t2is --open_twins` "
                "makes open prompts"
            )
    if problems:
        raise ConfigError("\n".join(problems))
    names = [prompt_set.name for prompt_set in sets]
    train_rewards = merge_sets(trained, names)
    test_rewards = merge_sets(tested, names)
    if accelerator.is_main_process:
        others = {
            f"test {name}": reward
            for name, reward in test_rewards.items()
            if reward is not train_rewards.get(name)
        }
        write_records(train_rewards | others, folder)
    return RewardSets(train_rewards, test_rewards, set_rewards)


def _set_rewards(prompt_set: PromptSet, options: RunOptions) -> SetRewards:
    """What a prompt set is trained on. Raises ConfigError: The aggregation cannot be used."""
    weights = {}
    for name, weight in reward_weights(prompt_set.train.weights).items():
        if weight:
            weights[name] = weight
    try:
        aggregate_fn = get_aggregate_fn(
            options.train.aggregate_fn, weights, options.sample.global_std
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    aggregate_fn = aggregate_fn or partial(weighted_sum, weights)
    weights_of_function = getattr(aggregate_fn, "reward_weights", None)
    if prompt_set.name and weights_of_function is not None:
        others = [name for name in weights if weights_of_function[name] != weights[name]]
        if others:
            raise ConfigError(
                f"config.train.aggregate_fn has another weight of {', '.join(others)} than "
                f"config.datasets.{prompt_set.name}; give it no reward_weights, such as "
                "'product_aggregate_fn'"
            )
    return SetRewards(prompt_set.name, weights, aggregate_fn)


def _build_table(
    table: RewardTable, device: torch.device | str, built: dict[str, CheckedReward]
) -> dict[str, CheckedReward]:
    """The rewards of a table by short name; ``built`` has those that exist, and gets the others."""
    rewards = {}
    for name, kwargs in table.kwargs.items():
        identity = f"{name} {json.dumps(kwargs, sort_keys=True, default=str)}"
        if identity not in built:
            built[identity] = CheckedReward(name, kwargs, device)
        rewards[short_name(name)] = built[identity]
    return rewards


def evaluation_rewards(
    options: RunOptions, device: torch.device | str, items: Sequence[Item]
) -> dict[str, Reward]:
    """The rewards of an evaluation on ``items``, which have answered. Raises UserError."""
    sets = prompt_sets(options)
    require_distinct_names([prompt_set.test for prompt_set in sets])
    built: dict[str, CheckedReward] = {}
    rewards = []
    for number, prompt_set in enumerate(sets):
        rewards.append(_build_table(prompt_set.test, device, built))
        of_set = [item for item in items if item.dataset == number]
        for reward in rewards[-1].values():
            reward.check()
            reward.check_items(of_set)
    return merge_sets(rewards, [prompt_set.name for prompt_set in sets])


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
    if run.options.datasets:
        names = [prompt_set.name for prompt_set in run.prompt_sets]
        plan["prompts_of_sets"] = dict(zip(names, run.state.sampler.prompts, strict=True))
    plan["fingerprints"] = dict(run.earlier.fingerprints)
    texts = {"config.yaml": options_to_yaml(run.options), "plan.json": json.dumps(plan, indent=1)}
    for name, text in texts.items():
        write_atomically(run.folder / name, text)
        logger.info("%s:\n%s", run.folder / name, text)
    for note in run.plan.notes:
        logger.warning("%s", note)
