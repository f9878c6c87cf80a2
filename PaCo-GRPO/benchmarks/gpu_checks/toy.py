"""An epoch of every family on tiny random weights, compared with the CPU's."""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState

# The pipelines of the tests: tests/ is beside benchmarks/.
from tiny_policies import FAMILIES, build
from tiny_run import family_options

from gpu_checks.steps import Deviates, Skipped, Step
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.policies.speed import ATTENTION_BACKENDS
from paco_grpo.training.build import build_run
from paco_grpo.training.trainer import Trainer

# With a tiny epsilon, Adam's first step is the gradient's sign, and rounding near 0 shows at full
# size.
COMPARABLE = {
    "train__adam_epsilon": 1e-2,
    "train__learning_rate": 1e-2,
    "allow_tf32": False,
    "test__num_images": 2,
}
BF16 = {"mixed_precision": "bf16"}
LESS_MEMORY = {"speed__offload_vae": True, "enable_gradient_checkpointing": True}
# Largest distance of an adapter's update from the CPU's in float32, as a share of that update.
FLOAT32_LIMIT = 0.01
BF16_LIMIT = 0.3


class ToyRuns:
    """Runs of tiny models below ``folder``, on ``device`` and on the CPU."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder
        self.device = device
        self.model = functools.cache(lambda family: build(family, folder / "models" / family))
        self.on_cpu = functools.cache(lambda family: self.train(family, "cpu"))
        self.count = 0

    def train(self, family: str, device: str, epochs: int = 1, **changes: Any) -> torch.Tensor:
        """How the adapter moved in ``epochs``, flat, on the CPU."""
        self.count += 1
        run_name = f"{family}-{self.count}"
        changes = COMPARABLE | {"run_name": run_name, "num_epochs": epochs} | changes
        options = family_options(family, self.model(family), self.folder / family, **changes)
        with _accelerate_on(device):
            return _update(options)

    def compare(self, family: str, limit: float, **changes: Any) -> dict[str, float]:
        """One epoch on the device against one on the CPU in float32."""
        return _deviation(self.train(family, self.device, **changes), self.on_cpu(family), limit)

    def attention(self, name: str) -> dict[str, float]:
        """The backend ``name``, if it is installed."""
        try:
            return self.compare("flux", BF16_LIMIT, **BF16, speed__attention=name)
        except ConfigError as error:
            raise Skipped(str(error)[:120]) from error

    def quantized(self) -> dict[str, float]:
        """The base in nf4. It is another model, so its update is only bounded roughly."""
        if importlib.util.find_spec("bitsandbytes") is None:
            raise Skipped("bitsandbytes is not installed")
        update = self.train("flux", self.device, **BF16, pretrained__quantize="nf4")
        return _deviation(update, self.on_cpu("flux"), 1.0)

    def resumed(self) -> dict[str, float]:
        """Two epochs, with a stop between them, against two without."""
        whole = self.train("flux", self.device, epochs=2)
        again = {"run_name": "stopped", "save_freq": 1}
        first = self.train("flux", self.device, **again)
        second = self.train("flux", self.device, epochs=2, **again, resume_from="latest")
        return _deviation(first + second, whole, FLOAT32_LIMIT)


def _update(options: RunOptions) -> torch.Tensor:
    run = build_run(options)
    trainer = Trainer(run)
    parameters = list(run.state.parameters.values())
    before: list[torch.Tensor] = []
    train_epoch = trainer.epoch

    def epoch() -> None:  # after a checkpoint was loaded
        if not before:
            before.append(_flat(parameters))
        train_epoch()

    trainer.epoch = epoch
    trainer.fit()
    return _flat(parameters) - before[0]


def _flat(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """A copy on the CPU."""
    return torch.cat([parameter.detach().float().flatten() for parameter in parameters]).cpu()


def _deviation(update: torch.Tensor, reference: torch.Tensor, limit: float) -> dict[str, float]:
    if not update.isfinite().all() or not update.any():
        raise Deviates("the adapter did not move, or is not finite")
    share = float((update - reference).norm() / reference.norm())
    if share > limit:
        raise Deviates(f"the update differs from the reference by {share:.3g} of it, over {limit}")
    return {"deviation": share}


@contextlib.contextmanager
def _accelerate_on(device: str) -> Iterator[None]:
    """Accelerate looks for devices once per process; here it looks again, and at the end too."""
    before = os.environ.pop("ACCELERATE_USE_CPU", None)
    if device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.pop("ACCELERATE_USE_CPU", None)
        if before is not None:
            os.environ["ACCELERATE_USE_CPU"] = before


def first_steps(runs: ToyRuns, families: list[str]) -> list[Step]:
    """Each family in float32, then what the recipes use."""
    steps = []
    for family in families:
        check = functools.partial(runs.compare, family, FLOAT32_LIMIT)
        steps.append(Step(f"{family}, float32", 60, check))
    in_bf16 = functools.partial(runs.compare, "flux", BF16_LIMIT, **BF16)
    return [
        *steps,
        Step("flux, bf16", 30, in_bf16),
        Step("flux, less memory", 30, functools.partial(in_bf16, **LESS_MEMORY)),
        Step("flux, resumed", 60, runs.resumed),
    ]


def later_steps(runs: ToyRuns) -> list[Step]:
    """What compiles or may not be installed; only on a GPU."""
    compiled = functools.partial(runs.compare, "flux", BF16_LIMIT, **BF16, speed__compile=True)
    steps = [Step("flux, compiled", 120, compiled), Step("flux, nf4", 30, runs.quantized)]
    for name in ATTENTION_BACKENDS:
        if not name.endswith("_hub"):  # those would download a kernel
            steps.append(Step(f"flux, {name}", 30, functools.partial(runs.attention, name)))
    return steps


def all_families() -> list[str]:
    """The names that ``--families`` knows."""
    return list(FAMILIES)
