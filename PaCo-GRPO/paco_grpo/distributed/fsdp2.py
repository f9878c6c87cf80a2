"""FSDP2: the transformer's weights sharded over the processes (torch's ``fully_shard``).

Also the choice between it and whole weights on every process.
"""

import logging
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, gather_object
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from paco_grpo.distributed.processes import (
    Strategy,
    full_tensor,
    make_float32,
    trains_transformer,
)
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.policies.base import Policy
from paco_grpo.policies.lora import lora_parameters

logger = logging.getLogger(__name__)


class FSDP2(Strategy):
    """The transformer's weights are sharded over the processes, block by block.

    With LoRA only the frozen base is sharded: adapters are small, float32 next to a bfloat16 base,
    and stay whole on every process. Without LoRA everything is sharded: parameters, gradients and
    optimizer.
    """

    name = "fsdp2"
    lockstep = True

    @property
    def loading_device(self) -> torch.device:
        """Main memory: a model that needs sharding may not fit on one device."""
        return torch.device("cpu")

    def place(self, policy: Policy) -> None:
        """Shard block by block: a device never holds more than its share and one block.

        Nor does main memory hold more than one block's float32 copy, if all weights are trained.
        """
        device = self.accelerator.device
        policy.device = device
        transformer = policy.transformer
        names = set(transformer._no_split_modules or transformer._repeated_blocks or ())
        blocks = [module for module in transformer.modules() if type(module).__name__ in names]
        if not blocks:
            raise ConfigError(
                f"config.train.sharding='fsdp2': {type(transformer).__name__} does not name its "
                "blocks"
            )
        kept_whole = set(lora_parameters(policy).values())
        for parameter in kept_whole:
            parameter.data = parameter.data.to(device)
        trains_everything = trains_transformer(policy)
        mesh = _mesh(device.type, self.accelerator.num_processes)
        for module in (*blocks, transformer):
            if trains_everything:
                make_float32(module)
            fully_shard(module, mesh=mesh, ignored_params=kept_whole, reshard_after_forward=True)
        for module in transformer.modules():
            if isinstance(module, FSDPModule):
                # Sums, not means, and the only reduction that gloo supports.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def finish_gradients(
        self, parameters: Sequence[torch.nn.Parameter], max_norm: float
    ) -> torch.Tensor:
        """As in ``Strategy``; gradients of sharded parameters were summed during the backward."""
        if not any(isinstance(parameter, DTensor) for parameter in parameters):
            return super().finish_gradients(parameters, max_norm)
        return full_tensor(torch.nn.utils.clip_grad_norm_(parameters, max_norm))


def _mesh(device_type: str, processes: int) -> DeviceMesh:
    """(machines, processes of one), so that weights travel only inside a machine.

    Every machine holds all shards then. It is one dimension on a single machine, where machines
    have different numbers of processes, and where each has a single one.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    is_even = set(gather_object([local])) == {local}
    if not is_even or local in (1, processes):
        return init_device_mesh(device_type, (processes,))
    shape = (processes // local, local)
    return init_device_mesh(device_type, shape, mesh_dim_names=("machines", "processes"))


def save_transformer(transformer: torch.nn.Module, folder: Path, write: bool) -> None:
    """Write ``transformer`` as diffusers reads it; without ``write``, only help to gather it."""
    if not isinstance(transformer, FSDPModule):
        if write:
            transformer.save_pretrained(folder)
        return
    weights = {}
    for name, tensor in transformer.state_dict().items():
        value = full_tensor(tensor)
        if write:
            weights[name] = value.cpu()
    if not write:
        return
    # fully_shard prepends its own class to the model's; the copy that is written has the model's
    # class.
    (model_class,) = (base for base in type(transformer).__bases__ if base is not FSDPModule)
    with torch.device("meta"):
        copy = model_class.from_config(transformer.config)
    copy.load_state_dict(weights, assign=True)
    copy.save_pretrained(folder)


def start_processes(options: RunOptions) -> Strategy:
    """The strategy over the processes that the launcher started."""
    # Mixed precision is the policy's own (one autocast for rollout and training), so accelerate
    # gets none.
    # Processes wait for each other's rewards, which may take longer than the default timeout.
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=2))])
    return build_strategy(options, accelerator)


def build_strategy(options: RunOptions, accelerator: Accelerator) -> Strategy:
    """The strategy that ``config.train.sharding`` names."""
    kind = accelerator.distributed_type
    if kind not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        raise ConfigError(
            f"accelerate was started with {kind}; use MULTI_GPU, and "
            "config.train.sharding='fsdp2' to shard"
        )
    if options.train.sharding is None:
        return Strategy(accelerator)
    if accelerator.num_processes == 1:
        logger.warning(
            "config.train.sharding='fsdp2', but there is only one process: nothing is sharded"
        )
        return Strategy(accelerator)
    for option, value in (
        ("speed.compile", options.speed.compile),
        ("pretrained.quantize", options.pretrained.quantize),
    ):
        if value:
            raise ConfigError(
                f"config.{option} cannot be combined with config.train.sharding='fsdp2'"
            )
    return FSDP2(accelerator)
