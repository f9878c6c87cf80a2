"""How weights, gradients and optimizer are spread over the processes. The mathematics is the same with every engine.

Losses are divided by the number of kept samples of all processes before they come here, so an engine *sums* gradients
over the processes. The trainer asks for nothing else: it knows neither who holds which weight, nor who sends what.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import InitProcessGroupKwargs
from ml_collections import ConfigDict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from paco_grpo.policies.adapters import lora_parameters, unwrap
from paco_grpo.policies.base import Policy
from paco_grpo.training import checkpoint as ckpt
from paco_grpo.training.configuration import ConfigError
from paco_grpo.training.processes import any_process, sum_gradients
from paco_grpo.training.sharded import whole

logger = logging.getLogger(__name__)

MakeOptimizer = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]


class Engine:
    """Every process holds all weights and its own optimizer; gradients are summed once before an optimizer step.

    LoRA gradients are small, so one message an optimizer step costs less than hooks on every backward.

    Attributes:
        name: For the log and plan.json.
        joint_forwards: A forward is an act of all processes, so they must run equally many (see ``turns``).
        joint_backwards: The same of backwards.
    """

    name = "replicated"
    joint_forwards = False
    joint_backwards = False

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    @property
    def loading_device(self) -> torch.device:
        """Where the generator is to be loaded before ``place``."""
        return self.accelerator.device

    def place(self, policy: Policy) -> None:
        """Put a policy that lies on ``loading_device``, its adapters on, to where it computes."""

    def prepare(self, policy: Policy, parameters: Sequence[torch.nn.Parameter], make: MakeOptimizer) -> Any:
        """The optimizer of ``parameters``, which ``make`` builds."""
        return make(parameters)

    def turns(self, own: int, backward: bool = False) -> int:
        """Turns of a loop of forwards (or with ``backward``, of both) in which this process has work for ``own``.

        Where they are acts of all processes, it is the most that any process has: one that has done its own then
        repeats something and drops the result. All processes call it.
        """
        joint = self.joint_backwards if backward else self.joint_forwards
        if not joint or self.accelerator.num_processes == 1:
            return own
        counts = self.accelerator.gather(torch.tensor([own], device=self.accelerator.device))
        return int(counts.max())

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Add the gradients of ``loss``; ``last``: the optimizer step comes next."""
        loss.backward()

    def finish_gradients(
        self, parameters: Sequence[torch.nn.Parameter], finite: bool, max_norm: float
    ) -> tuple[bool, float]:
        """Sum the gradients of all processes, in place, and clip them.

        Returns:
            Whether ``finite`` was true on every process, and the norm before clipping.
        """
        finite = sum_gradients(self.accelerator, parameters, finite)
        return finite, float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))

    def step(self, optimizer: Any) -> None:
        """One optimizer step with the gradients of ``finish_gradients``, which are then gone."""
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def drop_gradients(self, optimizer: Any) -> None:
        """No step: the gradients are thrown away."""
        optimizer.zero_grad(set_to_none=True)

    def save_optimizer(self, folder: Path, optimizer: Any) -> None:
        """Write the optimizer's state; every process calls it."""
        ckpt.save_optimizer(folder, optimizer, write=self.accelerator.is_main_process)

    def load_optimizer(self, folder: Path, optimizer: Any) -> None:
        """Restore what ``save_optimizer`` wrote.

        Raises:
            CheckpointError: It is missing, damaged or of another kind.
        """
        ckpt.load_optimizer(folder, optimizer)


class Fsdp2Engine(Engine):
    """The transformer's weights are divided over the processes, block by block (torch's ``fully_shard``).

    With LoRA only the frozen base is divided: adapters are small, float32 beside a bfloat16 base, and stay whole on
    every process, so the optimizer, the average, checkpoints and saved adapters are those of the replicated engine.
    Without LoRA everything is divided, parameters, gradients and optimizer; checkpoints hold whole tensors, whatever the
    number of processes.

    Args:
        accelerator: The processes.
        reshard_after_forward: A block's weights are given up after its forward and gathered again for its backward.
        offload_policy: Of ``fully_shard``; None = the weights stay on the device.
        block_classes: Names of the classes that are divided one by one; None = those the model names.
    """

    name = "fsdp2"
    joint_forwards = True
    joint_backwards = True

    def __init__(
        self,
        accelerator: Accelerator,
        reshard_after_forward: bool = True,
        offload_policy: Any = None,
        block_classes: Sequence[str] | None = None,
    ) -> None:
        super().__init__(accelerator)
        self.block_classes = block_classes
        self.options: dict[str, Any] = {"reshard_after_forward": reshard_after_forward}
        if offload_policy is not None:
            self.options["offload_policy"] = offload_policy

    @property
    def loading_device(self) -> torch.device:
        """Main memory: a model that needs dividing may not fit on one device."""
        return torch.device("cpu")

    def place(self, policy: Policy) -> None:
        """Divide the transformer, block by block, so that a device never holds more than its part and one block."""
        device = self.accelerator.device
        policy.device = device
        policy.move_text_encoders(device)
        policy.move_vae(device)
        transformer = unwrap(policy.transformer)
        names = set(self.block_classes or transformer._no_split_modules or ())
        blocks = [module for module in transformer.modules() if type(module).__name__ in names]
        if not blocks:
            raise ConfigError(
                f"FSDP2: {type(transformer).__name__} has no blocks called {', '.join(sorted(names)) or '(none named)'}; "
                "correct fsdp_transformer_layer_cls_to_wrap in the accelerate configuration"
            )
        kept_whole = set(lora_parameters(policy))
        for parameter in kept_whole:
            parameter.data = parameter.data.to(device)
        mesh = init_device_mesh(device.type, (self.accelerator.num_processes,))
        for module in (*blocks, transformer):
            fully_shard(module, mesh=mesh, ignored_params=kept_whole, **self.options)
        for module in transformer.modules():
            if isinstance(module, FSDPModule):  # sums, not means; gloo can do no other
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def finish_gradients(
        self, parameters: Sequence[torch.nn.Parameter], finite: bool, max_norm: float
    ) -> tuple[bool, float]:
        """See :meth:`Engine.finish_gradients`; gradients of divided parameters were summed during the backward."""
        if not any(isinstance(parameter, DTensor) for parameter in parameters):
            return super().finish_gradients(parameters, finite, max_norm)
        finite = not any_process(self.accelerator, not finite)
        return finite, float(whole(torch.nn.utils.clip_grad_norm_(parameters, max_norm)))


def build_accelerator() -> Accelerator:
    """The processes, as the launcher started them."""
    # Mixed precision is the policy's own (one autocast for rollout and training), so accelerate gets none.
    # Processes wait for each other's rewards, which may take longer than the default timeout.
    return Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=2))])


def build_engine(config: ConfigDict, accelerator: Accelerator) -> Engine:
    """The engine that accelerate was started with, or that ``config.train.sharding`` names.

    Raises:
        ConfigError: This trainer does not drive it, or it contradicts another option.
    """
    engine = _find_engine(config, accelerator)
    if engine.joint_forwards:
        _refuse_what_does_not_go_with_joint_forwards(config)
    return engine


def _refuse_what_does_not_go_with_joint_forwards(config: ConfigDict) -> None:
    if config.sample.tail_cache:
        raise ConfigError(
            f"config.sample.tail_cache={config.sample.tail_cache} leaves blocks out, on each process others, but FSDP2 "
            "gathers a block's weights from all processes at once; set it to 0"
        )
    if config.sample.tail_weights is not None:
        raise ConfigError(
            f"config.sample.tail_weights={config.sample.tail_weights!r} does not go with FSDP2: weights that are divided over "
            "processes cannot be copied in fewer bits; set it to None"
        )
    if config.speed.compile:
        raise ConfigError("config.speed.compile=True does not go with FSDP2 yet; set it to False")
    if config.pretrained.quantize is not None:
        raise ConfigError(
            f"config.pretrained.quantize={config.pretrained.quantize!r} does not go with FSDP2: weights of few bits cannot be "
            "divided; leave one of the two out"
        )


def _find_engine(config: ConfigDict, accelerator: Accelerator) -> Engine:
    kind, wanted = accelerator.distributed_type, config.train.sharding
    if kind == DistributedType.FSDP:
        return _fsdp_of_accelerate(accelerator)
    if kind == DistributedType.DEEPSPEED:
        return _zero_of_accelerate(config, accelerator)
    if kind not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        raise ConfigError(
            f"accelerate was started with {kind}, which this trainer does not drive; use one of the files in "
            "scripts/accelerate_configs"
        )
    for variable, file in (("ACCELERATE_USE_DEEPSPEED", "deepspeed_zero*.yaml"), ("ACCELERATE_USE_FSDP", "fsdp2.yaml")):
        if os.environ.get(variable) == "true" and accelerator.device.type == "cpu" and wanted is None:
            remedy = ": config.train.sharding='fsdp2' does on a CPU too" if "FSDP" in variable else ""
            logger.warning(
                "accelerate was started with %s, but falls back to plain data parallelism on a CPU: nothing is divided%s",
                file, remedy,
            )  # fmt: skip
    if wanted == "fsdp2":
        if accelerator.num_processes > 1:
            return Fsdp2Engine(accelerator)
        logger.warning("config.train.sharding='fsdp2', but there is one process only: nothing is divided")
    return Engine(accelerator)


def _zero_of_accelerate(config: ConfigDict, accelerator: Accelerator) -> Engine:
    from paco_grpo.training.zero import zero_of_accelerate

    for option, value in (
        ("train.sharding", config.train.sharding),
        ("train.use_8bit_adam", config.train.use_8bit_adam),
    ):
        if value:
            raise ConfigError(
                f"config.{option}={value!r} cannot be used with DeepSpeed, which accelerate was started with; leave it "
                "out, or take another accelerate configuration"
            )
    return zero_of_accelerate(accelerator, config.train.max_grad_norm)


def _fsdp_of_accelerate(accelerator: Accelerator) -> Engine:
    plugin = accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise ConfigError(
            "the accelerate configuration asks for FSDP version 1, which torch has given up; set fsdp_version: 2 as in "
            "scripts/accelerate_configs/fsdp2.yaml"
        )
    if plugin.activation_checkpointing:
        logger.warning(
            "fsdp_activation_checkpointing is not read; config.enable_gradient_checkpointing=True does the same"
        )
    return Fsdp2Engine(
        accelerator,
        reshard_after_forward=plugin.reshard_after_forward,
        offload_policy=plugin.cpu_offload,
        block_classes=plugin.transformer_cls_names_to_wrap,
    )
