"""Everything a run is made of, built in the order in which mistakes are cheapest to find."""

from __future__ import annotations

import inspect
import logging
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from ml_collections import ConfigDict
from PIL import Image

from paco_grpo.advantages import aggregation
from paco_grpo.data.prompts import load_prompts
from paco_grpo.data.sampler import GroupSampler
from paco_grpo.objectives import get_objective
from paco_grpo.policies import Policy
from paco_grpo.policies.adapters import add_lora, add_old_adapter
from paco_grpo.rewards.registry import Reward, reward_weights
from paco_grpo.training import checkpoint as ckpt
from paco_grpo.training.batch_size import settle_batch_size
from paco_grpo.training.checks import check_config, check_images, check_model, check_writable, warn_of_a_slow_device
from paco_grpo.training.configuration import ConfigError, config_to_yaml
from paco_grpo.training.ema import EMA
from paco_grpo.training.engine import Engine, build_accelerator, build_engine
from paco_grpo.training.generator import load_generator
from paco_grpo.training.journal import ScoreJournal
from paco_grpo.training.observe import BaseProbe
from paco_grpo.training.pictures import captioned
from paco_grpo.training.plan import Plan, make_plan
from paco_grpo.training.processes import set_threads
from paco_grpo.training.reward_sets import build_reward_sets
from paco_grpo.training.speed import apply_speed, check_speed, on_cuda
from paco_grpo.training.texts import settle_text_length
from paco_grpo.training.tracking import MetricsFile, Tracker, build_tracker
from paco_grpo.training.update import Updater
from paco_grpo.types import Item

logger = logging.getLogger(__name__)

_TRACKED_IMAGES = 8
_FIRST_DISK_CHECK = 16 * 2**20  # before the size of a checkpoint is known


@dataclass
class Run:
    """The parts of a run; see the modules they come from."""

    config: ConfigDict
    plan: Plan
    accelerator: Accelerator
    engine: Engine
    folder: Path
    train_items: list[Item]
    test_items: list[Item]
    train_rewards: Mapping[str, Reward]
    test_rewards: Mapping[str, Reward]
    watched_rewards: Mapping[str, Reward]
    journal: ScoreJournal
    train_weights: Mapping[str, float]
    aggregate_fn: Any
    policy: Policy
    parameters: Mapping[str, torch.nn.Parameter]
    sampler: GroupSampler
    updater: Updater
    ema: EMA | None
    probe: BaseProbe | None
    metrics: MetricsFile
    tracker: Tracker | None  # on the main process
    extra_parameters: Mapping[str, Mapping[str, torch.nn.Parameter]] = field(default_factory=dict)

    @property
    def decay_type(self) -> int:
        """How the old adapter of nft follows (method §6)."""
        chosen = self.config.train.decay_type
        return chosen if chosen is not None else int(self.config.train.loss_type == "nft")

    def log_pictures(self, folder: Path, epoch: int) -> None:
        """Send an evaluation's contact sheet and first images, with prompts and scores, to the tracker."""
        with Image.open(folder / "sheet.png") as sheet:
            caption = f"first test items after epoch {epoch}"
            self.tracker.log_images("eval/sheet", [(sheet.convert("RGB"), caption)], epoch)
        if self.config.test.save_eval_images:
            self.tracker.log_images("eval/images", captioned(folder, _TRACKED_IMAGES), epoch)

    def close(self) -> None:
        """End the tracker and the talk between processes."""
        if self.tracker is not None:
            self.tracker.close()
        if self.accelerator.num_processes > 1:
            self.accelerator.end_training()


def build_run(config: ConfigDict, configuration_name: str = "run") -> Run:
    """Check, then build: configuration, folder, prompts, rewards (does the judge answer?), tracker, and then the model.

    Raises:
        ConfigError, DataError, RewardError, JudgeError, PolicyLoadError, TrackingError: One clear message each.
    """
    check_config(config)
    check_model(config)
    accelerator = build_accelerator()
    warn_of_a_slow_device(config, accelerator.device)
    engine = build_engine(config, accelerator)
    threads = set_threads(config.num_threads, accelerator.num_processes)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.allow_tf32
    folder = _run_folder(config, configuration_name, accelerator)
    train_items, test_items = (load_prompts(config.dataset, split, config.prompt_fn) for split in ("train", "test"))
    check_images(config, {"train": train_items, "test": test_items})
    settle_text_length(config, [*train_items, *test_items])
    check_speed(config, accelerator.device)
    weights = reward_weights(config.train.reward_fn)
    aggregate_fn = _aggregate_fn(config, weights)
    journal = ScoreJournal(folder / "scores", accelerator.process_index)
    rewards = build_reward_sets(config, accelerator.device, journal, train_items, test_items)
    tracker = _tracker(config, folder) if accelerator.is_main_process else None
    policy, parameters, extra = _policy(config, engine)
    apply_speed(config, policy)
    batch_size = settle_batch_size(config, policy, train_items, accelerator, folder)
    plan = make_plan(config, accelerator.num_processes, batch_size)
    # weights, average, two Adam moments and two saved adapters, for every checkpoint that is kept and the next one
    check_writable(folder, 6 * 4 * sum(p.numel() for p in parameters.values()) * (config.num_checkpoint_limit + 1))
    ema = EMA(parameters, config.train.ema_decay, config.train.ema_update_interval) if config.train.ema else None
    run = Run(
        config=config,
        plan=plan,
        accelerator=accelerator,
        engine=engine,
        folder=folder,
        train_items=train_items,
        test_items=test_items,
        train_rewards=rewards.train,
        test_rewards=rewards.test,
        watched_rewards=rewards.watched,
        journal=journal,
        train_weights=weights,
        aggregate_fn=aggregate_fn,
        policy=policy,
        parameters=parameters,
        sampler=GroupSampler(len(train_items), plan.prompts, plan.images_per_prompt, config.seed),
        updater=Updater(
            policy=policy,
            objective=get_objective(config.train.loss_type),
            optimizer=engine.prepare(policy, list(parameters.values()), lambda these: _optimizer(config, these)),
            parameters=list(parameters.values()),
            accelerator=accelerator,
            engine=engine,
            config=config,
            gradient_steps=plan.gradient_steps,
            after_step=ema.update if ema else lambda step: None,
        ),
        ema=ema,
        probe=_probe(config, policy, test_items),
        metrics=MetricsFile(folder / "metrics.jsonl"),
        tracker=tracker,
        extra_parameters=extra,
    )
    if accelerator.is_main_process:
        _begin(run, threads)
    return run


def _run_folder(config: ConfigDict, configuration_name: str, accelerator: Accelerator) -> Path:
    if not config.run_name:
        name = [f"{configuration_name}-{time.strftime('%Y%m%d-%H%M%S')}"]
        config.run_name = broadcast_object_list(name)[0]
    folder = (Path(config.save_dir).expanduser() / config.run_name).absolute()
    held = (folder / "metrics.jsonl").is_file() and not config.resume_from
    accelerator.wait_for_everyone()
    if held:
        raise ConfigError(
            f"{folder} already holds a run; go on with it by --config.resume_from=latest, "
            "or choose another --config.run_name"
        )
    check_writable(folder, _FIRST_DISK_CHECK)
    return folder


def _aggregate_fn(config: ConfigDict, weights: Mapping[str, float]):
    spec, kwargs = config.train.aggregate_fn, config.train.aggregate_fn_kwargs.to_dict()
    if not kwargs:
        try:
            return aggregation.get_aggregate_fn(spec, weights, config.sample.global_std)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    builder = getattr(aggregation, spec or "", None)
    parameters = inspect.signature(builder).parameters if callable(builder) else {}
    unknown = [name for name in kwargs if name not in parameters]
    if unknown:
        raise ConfigError(
            f"config.train.aggregate_fn_kwargs has {unknown[0]!r}, but aggregate_fn={spec!r} takes "
            f"{', '.join(parameters) or 'nothing'}"
        )
    if "reward_weights" in parameters:
        kwargs.setdefault("reward_weights", weights)
    return builder(**kwargs)


def _policy(
    config: ConfigDict, engine: Engine
) -> tuple[Policy, dict[str, torch.nn.Parameter], dict[str, dict[str, torch.nn.Parameter]]]:
    """The generator, its trainable parameters by name, and further weights that belong to the state of a run."""
    policy = load_generator(config, engine.loading_device)
    _seed_everything(config.seed)  # the adapter's gaussian start is the same on every process
    if config.use_lora:
        add_lora(policy, config.train.lora_rank, config.train.lora_alpha, lora_path=config.train.lora_path)
    else:
        policy.transformer.float().requires_grad_(True)
    if config.enable_gradient_checkpointing:
        policy.transformer.enable_gradient_checkpointing()
    extra = {}
    if config.train.loss_type == "nft":
        add_old_adapter(policy)
    engine.place(policy)
    if config.train.loss_type == "nft":
        extra["old"] = {n: p for n, p in policy.transformer.named_parameters() if ".old." in n}
    _seed_everything(config.seed + 1 + engine.accelerator.process_index)
    parameters = {n: p for n, p in policy.transformer.named_parameters() if p.requires_grad}
    return policy, parameters, extra


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _optimizer(config: ConfigDict, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    train = config.train
    kwargs: dict[str, Any] = {
        "lr": train.learning_rate,
        "betas": (train.adam_beta1, train.adam_beta2),
        "weight_decay": train.adam_weight_decay,
        "eps": train.adam_epsilon,
    }
    if not train.use_8bit_adam:
        return torch.optim.AdamW(parameters, fused=on_cuda(config.speed.fused_adam, parameters[0].device), **kwargs)
    try:
        import bitsandbytes
    except ImportError as error:
        raise ConfigError(
            "config.train.use_8bit_adam=True needs bitsandbytes: pip install 'paco-grpo[adam8bit]', or set it to False"
        ) from error
    return bitsandbytes.optim.AdamW8bit(parameters, **kwargs)


def _tracker(config: ConfigDict, folder: Path) -> Tracker:
    values = yaml.safe_load(config_to_yaml(config))
    return build_tracker(config.logging_platform, folder, config.project_name, config.run_name, values)


def _probe(config: ConfigDict, policy: Policy, items: list[Item]) -> BaseProbe | None:
    """None where it is off, or where the base model is not there any more (training without LoRA)."""
    if not config.health.probe_images or not config.use_lora:
        return None
    return BaseProbe(policy, items[: config.health.probe_images], config)


def _begin(run: Run, threads: int) -> None:
    """Write down and say what will be done (main process)."""
    config, plan = run.config, run.plan
    text = config_to_yaml(config)
    (run.folder / "config.yaml").write_text(text, encoding="utf-8")
    ckpt.save_json(run.folder / "plan.json", plan.as_dict() | {"threads_per_process": threads, "engine": run.engine.name})
    logger.info("configuration:\n%s", text)
    for note in plan.notes:
        logger.warning("%s", note)
    logger.info(
        "%d process(es), weights %s, on %s with %d CPU thread(s) each; %d train and %d test items; %d prompts x %d images an epoch in "
        "batches of %d; %d optimizer step(s) an epoch; %.2f M trainable parameters; run folder %s",
        plan.num_processes, run.engine.name, run.accelerator.device.type, threads, len(run.train_items), len(run.test_items),
        plan.prompts, plan.images_per_prompt, plan.sample_batch_size, plan.gradient_steps,
        sum(p.numel() for p in run.parameters.values()) / 1e6, run.folder,
    )  # fmt: skip
