"""Builds the parts of a run, cheap checks first."""

import contextlib
import dataclasses
import json
import logging
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch

from paco_grpo.advantages.aggregation import get_aggregate_fn
from paco_grpo.advantages.groups import SetRewards, weighted_sum
from paco_grpo.data.sets import PromptSet, divide, items_in_turn, load_items, prompt_sets
from paco_grpo.distributed import Strategy, main_decides, start_processes
from paco_grpo.evaluation.evaluate import log_repeats
from paco_grpo.monitoring.health import ReferenceProbe
from paco_grpo.monitoring.log import kept_log
from paco_grpo.monitoring.trackers import MetricsFile, Tracker
from paco_grpo.objectives import create_objective
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.options.parse import options_to_dict, options_to_yaml
from paco_grpo.options.schema import TrainOptions
from paco_grpo.policies import comfyui
from paco_grpo.policies.adapters import add_adapters
from paco_grpo.policies.loading import apply_speed, load_generator
from paco_grpo.policies.lora import lora_parameters
from paco_grpo.rewards.registry import reward_weights, write_records
from paco_grpo.rewards.sets import begun, rewards_of
from paco_grpo.training import checks
from paco_grpo.training.checkpoints import Checkpoints
from paco_grpo.training.proof import proven
from paco_grpo.training.references import References
from paco_grpo.training.resolve import resolve, resolve_defaults
from paco_grpo.training.resume import (
    adapter_identities,
    compare_weights,
    find_earlier,
    identities,
    reward_identities,
)
from paco_grpo.training.run import Run, RunRewards
from paco_grpo.training.sample import GroupSampler, Sampler
from paco_grpo.training.state import EMA, TrainState, make_plan
from paco_grpo.training.summary import start_lines
from paco_grpo.training.update import Updater
from paco_judge.errors import UserError
from paco_judge.files import locked, write_atomically

logger = logging.getLogger(__name__)


def build_run(options: RunOptions, configuration_name: str = "run") -> Run:
    """Check the options and claim the run's folder; then build its parts.

    Without ``config.run_name``, the run is named by ``configuration_name`` and the main process's
    clock.

    Raises:
        UserError: The run cannot begin; the message says why.
    """
    options = resolve_defaults(options)
    checks.check_run(options)
    checks.check_adapters(options)
    strategy = start_processes(options)
    checks.warn_of_small_gpu(options, strategy.accelerator.device)
    name = options.run_name or f"{configuration_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    name = main_decides(strategy.accelerator, lambda: name)
    folder = Path(options.save_dir).absolute() / name
    with contextlib.ExitStack() as claim:  # without an error, ``Run.close`` ends it
        main_decides(strategy.accelerator, lambda: claim_folder(folder, claim))
        logger.info("%s in %s (config.yaml, plan.json)", configuration_name, folder)
        try:
            run = _build(options, name, strategy, folder, claim)
        except torch.OutOfMemoryError as error:
            raise ConfigError(checks.out_of_memory(options, error)) from error
        run.claim = claim.pop_all()
    return run


def claim_folder(folder: Path, claim: contextlib.ExitStack) -> None:
    """Make the folder, and until ``claim`` is closed, lock it and keep the log there.

    Raises UserError: Another trainer has it, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the folder of the run cannot be made ({error}); choose another config.run_name or "
            "config.save_dir"
        ) from error
    claim.enter_context(locked(folder))
    claim.enter_context(kept_log(folder))


def _build(
    options: RunOptions,
    run_name: str,
    strategy: Strategy,
    folder: Path,
    claim: contextlib.ExitStack,
) -> Run:
    """The parts of a run, cheap checks first."""
    accelerator = strategy.accelerator

    # Prompts, and options that no longer change.
    sets = prompt_sets(options)
    train_items = load_items(sets, "train")
    test_items = load_items(sets, "test")
    options = resolve(options, [*train_items, *test_items], run_name)
    objective = create_objective(options)

    # An earlier run, readable images, rewards that have answered, and the tracker.
    items = {"train": train_items, "test": test_items}
    earlier = main_decides(accelerator, lambda: find_earlier(options, sets, folder))
    checks.check_items(options, items)
    references = References([*train_items, *test_items], folder, accelerator)
    references.check_headers()
    set_rewards = [training_rewards(prompt_set, options) for prompt_set in sets]
    rewards = RunRewards(**rewards_of(sets, accelerator.device, items))

    def compare() -> None:
        weights = reward_identities(rewards.all()) | adapter_identities(objective)
        compare_weights(options, earlier, weights)

    main_decides(accelerator, compare)
    if accelerator.is_main_process:
        log_repeats(test_items, sets, options, rewards.test)
        write_records(rewards.all(), folder)
    resumes = bool(options.resume_from)
    claim.enter_context(begun(rewards.all().values(), folder, accelerator, resumes))
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
    snapshot_names = [snapshot.name for snapshot in objective.snapshots]
    add_adapters(policy, options, snapshot_names, objective.adapters)
    skipped = comfyui.skipped_layers(policy)
    if skipped and accelerator.is_main_process:
        logger.warning("%s (config.train.lora_targets)", skipped)
    strategy.place(policy)
    with strategy.same_outcome():
        proof = proven(policy, options, [*train_items, *test_items], earlier.proof)
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
    )
    counts = Counter(item.dataset for item in train_items)
    groups = GroupSampler(
        [counts[number] for number in range(len(sets))],
        divide(plan.prompts, [prompt_set.share for prompt_set in sets]),
        plan.images_per_prompt,
        options.seed,
        options.sample.latents_per_prompt,
    )
    # Without LoRA there is no base model left to compare with.
    num_probes = min(options.health.probe_images, len(test_items)) if options.use_lora else 0
    probe_items = items_in_turn(test_items, num_probes)
    return Run(
        options=options,
        plan=plan,
        folder=folder,
        resumes_from=earlier.checkpoint,
        proof=proof,
        objective=objective,
        prompt_sets=sets,
        references=references,
        train_items=train_items,
        test_items=test_items,
        rewards=rewards,
        set_rewards=set_rewards,
        state=state,
        sampler=Sampler(state, groups, train_items, options, objective, plan.sample_batch_size),
        updater=Updater(state, objective, options, plan.gradient_steps),
        checkpoints=Checkpoints(folder, options, state),
        probe=ReferenceProbe(policy, probe_items, options) if probe_items else None,
        metrics=MetricsFile(folder / "metrics.jsonl"),
        tracker=tracker,
    )


def training_rewards(prompt_set: PromptSet, options: RunOptions) -> SetRewards:
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
    if aggregate_fn is None:
        aggregate_fn = partial(weighted_sum, weights)
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


def _optimizer(train: TrainOptions, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if train.use_8bit_adam:
        import bitsandbytes

        adam = bitsandbytes.optim.AdamW8bit
    else:
        adam = partial(torch.optim.AdamW, fused=parameters[0].device.type == "cuda")
    return adam(
        parameters,
        lr=train.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        weight_decay=train.adam_weight_decay,
        eps=train.adam_epsilon,
    )


def record_start(run: Run) -> None:
    """Write config.yaml and plan.json, and log what matters of them (main process).

    Call it after the checkpoint is loaded, so that a refused resume keeps the old files.
    """
    plan = dataclasses.asdict(run.plan)
    device = run.accelerator.device
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else device.type
    plan |= {"device": name, "engine": run.state.strategy.name}
    if run.options.datasets:
        names = [prompt_set.name for prompt_set in run.prompt_sets]
        plan["prompts_of_sets"] = dict(zip(names, run.sampler.groups.prompts, strict=True))
    weights = reward_identities(run.rewards.all()) | adapter_identities(run.objective)
    plan["identities"] = identities(run.options, run.prompt_sets) | weights
    if run.proof:
        plan["proof"] = run.proof
    texts = {"config.yaml": options_to_yaml(run.options), "plan.json": json.dumps(plan, indent=1)}
    for name, text in texts.items():
        write_atomically(run.folder / name, text)
    for line in start_lines(run, plan):
        logger.info("%s", line)
    for note in run.plan.notes:
        logger.warning("%s", note)
