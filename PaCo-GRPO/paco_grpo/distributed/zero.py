"""DeepSpeed ZeRO-1 and 2 (arXiv 1910.02054); DeepSpeed is imported only when such a run is built.

DeepSpeed gets the trainable parameters and nothing else. So the frozen base keeps its precision (a whole model would be
cast to one), rollout and training call the transformer as always, and adapters stay whole on every process: average,
checkpoints and saved adapters are those of ``Replicated``. The optimizer states are sharded and, in stage 2, the summed
gradients.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from paco_grpo.distributed.processes import Replicated, any_process
from paco_grpo.options import ConfigError, RunOptions

logger = logging.getLogger(__name__)

_MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's


class ZeRO(Replicated):
    """The optimizer over the trainable parameters, sharded by DeepSpeed as accelerate was told to.

    Args:
        accelerator: The processes.
        options: The run's.

    Raises:
        ConfigError: Another stage than 1 and 2, offloading to disk, or an option that contradicts DeepSpeed.
    """

    collective_backwards = True  # stage 2 sums gradients in every backward

    def __init__(self, accelerator: Accelerator, options: RunOptions) -> None:
        super().__init__(accelerator)
        train = options.train
        for option, value in (("sharding", train.sharding), ("use_8bit_adam", train.use_8bit_adam)):
            if value:
                raise ConfigError(
                    f"config.train.{option}={value!r} cannot be combined with DeepSpeed, which accelerate was started "
                    "with; leave it out, or use another accelerate configuration"
                )
        given = accelerator.state.deepspeed_plugin.deepspeed_config.get("zero_optimization", {})
        zero = {name: value for name, value in given.items() if value not in (None, "auto")}
        for name in ("offload_optimizer", "offload_param"):
            device = (zero.pop(name, None) or {}).get("device")
            if device == "nvme":
                raise ConfigError(
                    f"the accelerate configuration has {name} on nvme, which is not supported: use cpu or none"
                )
            if name == "offload_optimizer" and device == "cpu":
                zero[name] = {"device": "cpu", "pin_memory": accelerator.device.type == "cuda"}
        stage = zero.get("stage")
        if stage not in (1, 2):
            raise ConfigError(
                f"DeepSpeed ZeRO stage {stage} is not supported (1 and 2 are). To shard the weights themselves, which is "
                "stage 3, use scripts/accelerate_configs/fsdp2.yaml"
            )
        self.name = f"deepspeed-zero{stage}"
        if accelerator.is_main_process:
            logger.warning("DeepSpeed ZeRO is experimental: it has never been run on GPUs")
        self.settings = {
            "train_micro_batch_size_per_gpu": 1,  # read by DeepSpeed's own data loaders only
            "gradient_accumulation_steps": 1,  # the trainer tells which backward is the last
            "gradient_clipping": train.max_grad_norm,
            "zero_optimization": zero,
            "zero_force_ds_cpu_optimizer": False,  # offloaded states are updated by the configured AdamW
            "steps_per_print": 2**31,
        }

    def prepare(self, optimizer: torch.optim.Optimizer) -> Any:
        """DeepSpeed's wrapper of ``optimizer``."""
        import deepspeed

        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.deepspeed, wrapped, _, _ = deepspeed.initialize(
            model=nn.ParameterList(self.parameters), optimizer=optimizer, config=self.settings
        )
        return wrapped

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """DeepSpeed averages over processes; we want the sum."""
        self.deepspeed.set_gradient_accumulation_boundary(last)
        self.deepspeed.backward(loss * self.accelerator.num_processes)

    def finish_gradients(
        self, parameters: Sequence[nn.Parameter], finite: torch.Tensor, max_norm: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums are there already, and DeepSpeed clips within its step."""
        everywhere = not any_process(self.accelerator, not bool(finite))
        norm = torch.as_tensor(float(self.deepspeed.optimizer.scaled_global_norm()), device=finite.device)
        return torch.tensor(everywhere, device=finite.device), norm

    def step(self, optimizer: Any) -> None:
        """DeepSpeed's step, which also clears the gradients."""
        self.deepspeed.step()

    def optimizer_state(self, optimizer: Any) -> Mapping[str, Any]:
        """Whole moments in the layout of ``Replicated``, so that a run may resume with another strategy or another number
        of processes."""
        from deepspeed.utils import safe_get_full_optimizer_state

        entries: dict[int, dict[str, Any]] = {}
        steps = [entry["step"] for entry in optimizer.optimizer.state.values() if "step" in entry]
        for index, parameter in enumerate(self.parameters if steps else ()):
            entries[index] = {name: safe_get_full_optimizer_state(parameter, name) for name in _MOMENTS}
            entries[index]["step"] = torch.as_tensor(float(steps[0]))
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        groups[0]["params"] = list(range(len(self.parameters)))
        return {"state": entries, "param_groups": groups}

    def load_optimizer_state(self, optimizer: Any, saved: dict[str, Any]) -> None:
        """Also takes over the parameters, which were loaded before."""
        from deepspeed.utils import safe_set_full_optimizer_state

        optimizer.refresh_fp32_params()
        for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({name: value for name, value in values.items() if name in group and name != "params"})
        if not saved["state"]:
            return
        # DeepSpeed creates the states, and their mapping to parameters, in its first step.
        for part in optimizer.single_partition_of_fp32_groups:
            entry = optimizer.optimizer.state[part]
            entry["step"] = copy.deepcopy(torch.as_tensor(saved["state"][0]["step"]))
            entry |= {name: torch.zeros_like(part) for name in _MOMENTS}
        optimizer._lazy_init_hp_params_optimizer_state()
        for index, parameter in enumerate(self.parameters):
            for name in _MOMENTS:
                safe_set_full_optimizer_state(parameter, saved["state"][index][name].to(parameter.device), name)
