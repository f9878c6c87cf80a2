"""FSDP2: the transformer's weights sharded over the processes (torch's ``fully_shard``)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from paco_grpo.distributed.collectives import any_process, full_tensor
from paco_grpo.distributed.replicated import Replicated
from paco_grpo.options import ConfigError
from paco_grpo.policies.base import Policy, unwrap
from paco_grpo.policies.lora import lora_parameters

logger = logging.getLogger(__name__)


class FSDP2(Replicated):
    """The transformer's weights are sharded over the processes, block by block.

    With LoRA only the frozen base is sharded: adapters are small, float32 next to a bfloat16 base, and stay whole on
    every process, so optimizer, average, checkpoints and saved adapters are those of ``Replicated``. Without LoRA
    everything is sharded (parameters, gradients and optimizer); checkpoints hold full tensors for any number of
    processes.

    Args:
        accelerator: The processes.
        reshard_after_forward: Free a block's gathered weights after its forward and gather them again for its backward.
        offload_policy: Passed to ``fully_shard``; None = the weights stay on the device.
        block_classes: Names of the classes that are sharded one by one; None = those the model names.
    """

    name = "fsdp2"
    collective_forwards = True
    collective_backwards = True

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
        """Main memory: a model that needs sharding may not fit on one device."""
        return torch.device("cpu")

    def place(self, policy: Policy) -> None:
        """Shard the transformer block by block, so that a device never holds more than its share and one block."""
        device = self.accelerator.device
        policy.device = device
        policy.move_encoders(device)
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
            if isinstance(module, FSDPModule):  # sums, not means, and the only reduction that gloo supports
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def finish_gradients(
        self, parameters: Sequence[torch.nn.Parameter], finite: torch.Tensor, max_norm: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in ``Replicated``; gradients of sharded parameters were summed during the backward."""
        if not any(isinstance(parameter, DTensor) for parameter in parameters):
            return super().finish_gradients(parameters, finite, max_norm)
        everywhere = not any_process(self.accelerator, not bool(finite))
        norm = full_tensor(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
        return torch.tensor(everywhere, device=norm.device), norm


def fsdp2_of_accelerate(accelerator: Accelerator) -> FSDP2:
    """The strategy of the FSDP plugin that accelerate was started with.

    Raises:
        ConfigError: It asks for FSDP version 1.
    """
    plugin = accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise ConfigError(
            "the accelerate configuration asks for FSDP version 1, which torch has deprecated; set fsdp_version: 2 as in "
            "scripts/accelerate_configs/fsdp2.yaml"
        )
    if plugin.activation_checkpointing:
        logger.warning("fsdp_activation_checkpointing is ignored; use config.enable_gradient_checkpointing=True")
    return FSDP2(
        accelerator,
        reshard_after_forward=plugin.reshard_after_forward,
        offload_policy=plugin.cpu_offload,
        block_classes=plugin.transformer_cls_names_to_wrap,
    )
