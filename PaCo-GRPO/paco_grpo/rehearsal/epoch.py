"""One small epoch of a configuration on a fake GPU, and what follows from it for a whole one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from PIL import Image
from torch import nn

from paco_grpo.data.prompts import DataError, load_prompts
from paco_grpo.objectives import get_objective
from paco_grpo.options import RunOptions
from paco_grpo.policies import policy_class
from paco_grpo.policies.performance import quantize
from paco_grpo.rehearsal import models
from paco_grpo.rehearsal.fake_gpu import DEVICE, Counts, FakeGPU, Phase
from paco_grpo.training import build
from paco_grpo.training.plan import Plan, make_plan, on_cuda
from paco_grpo.training.trainer import Trainer

# Parameters of rewards that load a float32 model on the device of the process.
REWARD_PARAMETERS = {
    "subfig_clipT": ("OpenCLIP ViT-H-14", 986_109_441),
    "subfig_clipI": ("OpenCLIP ViT-H-14", 986_109_441),
    "pickscore": ("PickScore", 986_109_441),  # the same architecture, other weights
    "clipscore": ("CLIP ViT-L/14", 427_616_513),
}


@dataclass
class Work:
    """Work of one kind on one process.

    Attributes:
        name: What it is.
        each: Counts of one piece.
        epoch: Pieces an epoch.
    """

    name: str
    each: Counts
    epoch: float


@dataclass
class Rehearsal:
    """What one process of a configuration does and holds.

    Attributes:
        name: Of the configuration.
        plan: Of the real epoch.
        work: What an epoch consists of; evaluation and checkpoint are apart, in ``sometimes``.
        sometimes: Evaluation (all images of one) and one checkpoint.
        resident: Bytes that stay on the device, by part.
        adds: Bytes that a phase adds at its peak, by part.
        checkpoint_bytes: Written for one checkpoint.
        tested_at_once: Images of an evaluation's batch.
        notes: What was not run, and how it was computed instead.
    """

    name: str
    plan: Plan
    work: list[Work]
    sometimes: list[Work]
    resident: dict[str, int]
    adds: dict[str, dict[str, int]]
    checkpoint_bytes: int
    tested_at_once: int
    notes: list[str] = field(default_factory=list)

    @property
    def totals(self) -> dict[str, int]:
        """Bytes on the device at the peak of each phase."""
        held = sum(self.resident.values())
        return {phase: held + sum(parts.values()) for phase, parts in self.adds.items()}

    @property
    def peak(self) -> int:
        """Bytes on the device at the highest peak."""
        return max(self.totals.values())


def constant_reward() -> Callable[[Sequence, Sequence], np.ndarray]:
    """A reward factory: different numbers that need no picture."""
    return lambda images, items: np.linspace(0.0, 1.0, len(images))


def rehearse(
    options: RunOptions, name: str, processes: int = 1, memory: int = 80 * 2**30, shallow: bool = False
) -> Rehearsal:
    """Run the trainer's own code for one small epoch, one evaluation and one checkpoint on a fake GPU.

    Args:
        options: The configuration.
        name: Its name.
        processes: GPUs that share an epoch.
        memory: Bytes of the GPU.
        shallow: Few blocks in the transformer of a known model (fast, for tests: times and memory are too small).

    Raises:
        Exception: Whatever the code raises on a GPU: devices or data types that do not match, wrong shapes.
        models.UnknownModelError: The architecture of the model is not known.
    """
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="rehearse-") as place, _accelerate_state():
        folder = Path(place)
        architecture, model = (
            models.architecture_of(options.pretrained.model),
            Path(options.pretrained.model).expanduser(),
        )
        if architecture is not None:
            architecture = architecture.with_blocks(2, 1) if shallow else architecture
            model = models.write(architecture, folder / "model")
        with FakeGPU(memory) as gpu, _seam(gpu, options, model, architecture, folder) as written:
            small = _small(options, model, folder, notes)
            run = build.build_run(small, "rehearsal")
            return _run(gpu, run, options, name, processes, notes, written)


def _run(
    gpu: FakeGPU, run: build.Run, options: RunOptions, name: str, processes: int, notes: list[str], written: list[int]
) -> Rehearsal:
    meter, policy, trainer = gpu.meter, run.state.policy, Trainer(run)
    for parameter in run.state.parameters.values():  # the moments exist in every epoch but the first
        parameter.grad = torch.zeros_like(parameter)
    run.state.strategy.step(run.state.optimizer)
    resident = _resident(run, options)
    other = meter.now - sum(resident.values())
    if other > 0:
        resident["other"] = other
    held = meter.now
    records: list[Records] = []
    saved: list[int] = []
    gradients = sum(4 * p.numel() for p in run.state.parameters.values())

    def wrap(owner: Any, attribute: str, phase: str) -> None:
        setattr(owner, attribute, meter.during(phase, getattr(owner, attribute)))

    original_update = trainer._update

    def update(rollouts, *args):
        records.append(Records.of(rollouts))
        with gpu.recording():
            return original_update(rollouts, *args)

    strategy = run.state.strategy
    original_backward = strategy.backward

    def backward(loss):
        saved.append(meter.now)
        return original_backward(loss)

    trainer._update, strategy.backward = update, backward
    for owner, attribute, phase in (
        (trainer, "_sample", "sample"), (trainer, "_update", "update"), (trainer, "_evaluate", "evaluate"),
        (trainer, "_write_checkpoint", "checkpoint"), (run.updater, "prepare", "prepare"),
        (policy, "encode", "encode"), (policy, "decode", "decode"), (policy, "velocity", "denoise"),
        (strategy, "backward", "backward"), (strategy, "finish_gradients", "optimizer"), (strategy, "step", "optimizer"),
    ):  # fmt: skip
        wrap(owner, attribute, phase)
    trainer.fit()
    return _scaled(
        meter.phases, run, options, name, processes, notes, resident, held, records[0], saved, gradients, written
    )


def _resident(run: build.Run, options: RunOptions) -> dict[str, int]:
    """Bytes that stay on the device, by part."""
    policy = run.state.policy
    trained = {id(p) for p in run.state.parameters.values()}
    snapshots = {id(p) for parameters in run.state.snapshots.values() for p in parameters.values()}
    parts: dict[str, int] = {}

    def add(name: str, tensors) -> None:
        storages = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t.device.type == "cuda"
        }
        size = sum(-(-n // 512) * 512 for n in storages.values())
        if size:
            parts[name] = parts.get(name, 0) + size

    weights = [*policy.transformer.parameters(), *policy.transformer.buffers()]
    add("transformer", [p for p in weights if id(p) not in trained | snapshots])
    add("adapter" if options.use_lora else "trained weights", run.state.parameters.values())
    add("old adapter", [p for p in weights if id(p) in snapshots])
    state = run.state.optimizer.state
    add(
        "optimizer",
        [t for p in run.state.parameters.values() for t in state[p].values() if isinstance(t, torch.Tensor)],
    )
    if run.state.ema:
        add("average", run.state.ema.shadow.values())
    pipeline = policy.pipeline
    add("VAE", [*pipeline.vae.parameters(), *pipeline.vae.buffers()])
    for encoder in policy.text_encoders():
        add("text encoders", [*encoder.parameters(), *encoder.buffers()])
    return parts


def reward_bytes(options: RunOptions) -> dict[str, int]:
    """Bytes of local reward models on the device, by model; rewards that use the same one share it."""
    found = {}
    for name in {*options.train.reward_fn, *options.test.reward_fn}:
        kwargs = options.train.reward_fn_kwargs.get(name, {})
        elsewhere = str(kwargs.get("device", "cuda")).startswith("cpu") or "server" in kwargs
        if name in REWARD_PARAMETERS and not elsewhere:
            model, parameters = REWARD_PARAMETERS[name]
            found[model] = (2 if kwargs.get("dtype") in ("float16", "bfloat16") else 4) * parameters
    return found


@dataclass(frozen=True)
class Records:
    """Bytes that stay on the device from sampling to the update.

    Attributes:
        texts: Conditioning of all prompts.
        steps: Latents of the noise steps.
        rest: Of each image.
    """

    texts: int
    steps: int
    rest: int

    @classmethod
    def of(cls, rollouts: Any) -> Records:
        """What the sampled images hold."""
        texts = [t for sample in rollouts.samples for t in _tensors_of(sample.conditioning)]
        steps = [t for sample in rollouts.samples for step in sample.noise_steps for t in _tensors_of(step)]
        rest = [t for sample in rollouts.samples for t in _tensors_of(sample)]
        sizes, seen = [], set()
        for tensors in (texts, steps, rest):
            new = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t.device.type == "cuda"}
            sizes.append(sum(size for key, size in new.items() if key not in seen))
            seen |= new.keys()
        return cls(*sizes)

    @property
    def total(self) -> int:
        """Of all."""
        return self.texts + self.steps + self.rest


def _tensors_of(batched: Any) -> list[torch.Tensor]:
    found = []
    for value in vars(batched).values():
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list):
            found += [t for part in value for t in _tensors_of(part)]
        elif dataclasses.is_dataclass(value):
            found += _tensors_of(value)
    return found


def _scaled(
    phases, run, options, name, processes, notes, resident, held, records, saved, gradients, written
) -> Rehearsal:
    """From the small epoch to a real one."""
    objective = get_objective(options.train.loss_type)
    plan = make_plan(options, processes, objective.gradient_steps)
    sample, train, test = options.sample, options.train, options.test

    def each(phase: str) -> Counts:
        found = phases.get(phase, Phase())
        return found.counts.times(1 / max(1, len(found.calls)))

    def forward(phase: str, steps: float) -> Counts:
        """One of a rollout's ``steps`` forwards. Autocast casts weights in the first one; here, each second one is the first."""
        calls = phases[phase].calls
        first, others = (sum(part, Counts()).times(1 / max(1, len(part))) for part in (calls[::2], calls[1::2]))
        return (first + others.times(max(0, steps - 1))).times(1 / steps)

    images = run.plan.samples_per_process
    # forwards of one rollout batch
    noise = sample.num_noise_steps or len(set(sample.noise_steps)) if sample.noise_level else 0
    first = min(sample.noise_steps, default=sample.num_steps) if noise else sample.num_steps
    last = max(sample.noise_steps, default=0) if noise else sample.num_steps
    tail = sample.num_steps - 1 - last if noise else 0
    tail_run = min(tail, sample.tail_steps) if sample.tail_steps else tail
    forwards = sample.num_steps - tail + tail_run
    equal_noise = min(plan.sample_batch_size, sample.num_images_per_prompt // sample.latents_per_prompt)
    shared = first * (1 - 1 / equal_noise) if sample.same_latent else 0
    steps = [SimpleNamespace(index=index) for index in sample.noise_steps[:noise]]
    whole = SimpleNamespace(noise_steps=steps, sigmas=range(sample.num_steps + 1), cps=sample.cps)
    trained = len(objective.steps(train, whole, np.random.default_rng(0)))
    micro = -(-plan.samples_per_process // train.batch_size) * trained * train.num_inner_epochs
    micro_run = len(phases["update / backward"].calls)
    prompts = min(plan.prompts, plan.samples_per_process)
    updates = plan.gradient_steps * train.num_inner_epochs
    update = _total(phases, "update") - phases["update / optimizer"].counts
    test_batches = -(-_tested_images(options, notes) // (processes * test.batch_size))
    encode = each("sample / encode")
    work = [
        Work("texts to GPU", Counts(to_device=encode.to_device), 1),
        Work("encode", dataclasses.replace(encode, to_device=0), prompts),
        Work("denoise", forward("sample / denoise", forwards - shared), plan.rollout_batches * (forwards - shared)),
        Work("decode", each("sample / decode"), plan.rollout_batches),
        Work("train", update.times(1 / micro_run), micro),
        Work("optimizer", phases["update / optimizer"].counts, updates),
    ]
    if options.health.probe_images and options.use_lora:
        one = forward("sample / denoise", 1)
        probed = dataclasses.replace(one.times(1 / run.plan.sample_batch_size), kernels=one.kernels, casts=one.casts)
        work.append(Work("probe", probed, options.health.probe_images))
    sometimes = [
        Work("evaluation", forward("evaluate / denoise", test.num_steps).times(test.num_steps) + each("evaluate / decode"), test_batches),
        Work("checkpoint", _total(phases, "checkpoint"), 1),
    ]
    # memory
    per_image = (records.rest + records.steps * max(1, noise)) / images
    all_records = round(records.texts * prompts + per_image * plan.samples_per_process)
    adds: dict[str, dict[str, int]] = {}

    def peak(phase: str) -> int:
        return (
            max((p.peak for n, p in phases.items() if n == phase or n.startswith(f"{phase} / ")), default=held) - held
        )

    encoders, decoded = peak("sample / encode"), peak("sample / decode")
    adds["encode"] = {"text encoders and activations": encoders}
    denoise = peak("sample / denoise")
    adds["sample"] = {"records": all_records, "denoising": denoise}
    if on_cuda(options.speed.overlap_decode, DEVICE):
        adds["sample"]["decoding meanwhile"] = decoded
    else:
        adds["decode"] = {"records": all_records, "decoding": decoded}
    kept = max(saved) - held - records.total
    top = peak("update") - records.total
    adds["train"] = {"records": all_records, "gradients": gradients, "saved activations": max(0, kept - gradients)}
    adds["train"]["backward"] = max(0, top - gradients - adds["train"]["saved activations"])
    adds["update"] = {"records": all_records, "gradients": gradients}
    if processes > 1:
        adds["update"]["gradients in one message"] = gradients
    tested, shown = peak("evaluate / denoise"), peak("evaluate / decode")
    adds["evaluate"] = {"denoising": tested} | (
        {"decoding meanwhile": shown} if "decoding meanwhile" in adds["sample"] else {}
    )
    adds["checkpoint"] = {"averaged weights": peak("checkpoint")}
    resident = resident | reward_bytes(options)
    if options.train.sharding == "fsdp2" and processes > 1:
        notes.append(
            f"train.sharding=fsdp2 is computed, not run: the transformer's weights divided by {processes} processes"
        )
        resident["transformer"] //= processes
    return Rehearsal(name, plan, work, sometimes, resident, adds, sum(written), test.batch_size, notes)


def _tested_images(options: RunOptions, notes: list[str]) -> int:
    """Images of one evaluation: the data set is read for ``test.num_images=None``."""
    if options.test.num_images:
        return options.test.num_images
    try:
        return len(load_prompts(options.dataset, "test", options.prompt_fn))
    except DataError:
        notes.append(f"config.dataset={options.dataset} is not here: an evaluation is counted as one batch a process")
        return options.test.batch_size


def _total(phases: dict[str, Phase], phase: str) -> Counts:
    total = Counts()
    for name, found in phases.items():
        if name == phase or name.startswith(f"{phase} / "):
            total = total + found.counts
    return total


# --- the small epoch --------------------------------------------------------------------------------------------------


def _small(options: RunOptions, model: Path, folder: Path, notes: list[str]) -> RunOptions:
    """``options`` for one epoch with one batch of every kind: one noiseless step before the noise step, one after it."""
    sample, train, test, speed = options.sample, options.train, options.test, options.speed
    batch = sample.batch_size or 1
    images = batch * -(-2 * train.batch_size // batch)  # two micro-batches
    noisy = bool(sample.noise_steps and sample.noise_level)
    policy = policy_class(model)
    edits = policy.needs_image or (policy.edits_images and options.prompt_fn in ("geneval_image", "arrow_editing"))
    if speed.compile:
        notes.append("speed.compile is not run: kernels and bytes are those of uncompiled blocks")
    return dataclasses.replace(
        options,
        run_name="run", save_dir=str(folder / "runs"), resume_from=None, num_epochs=1, max_train_minutes=None,
        save_freq=0, eval_freq=0, logging_platform="none", num_threads=1,
        dataset=str(folder / "prompts"), prompt_fn="geneval_image" if edits else "geneval",
        pretrained=dataclasses.replace(options.pretrained, model=str(model)),
        sample=dataclasses.replace(
            sample, num_steps=2, noise_steps=(1,) if noisy else (), num_noise_steps=None, batch_size=batch,
            num_images_per_prompt=images, unique_sample_num_per_epoch=1, tail_steps=None,
            cps=sample.cps and train.loss_type != "flow_dppo",  # it refuses Flow-CPS's last step, here the only one
        ),
        train=dataclasses.replace(
            train, reward_fn={f"{__name__}:constant_reward": 1.0}, reward_fn_kwargs={}, aggregate_fn=None,
            aggregate_fn_kwargs={}, gradient_step_per_epoch=1, num_inner_epochs=1, lora_path=None,
            timesteps=(1,), num_sigmas=None, sharding=None, stop_on_collapse=False,
        ),
        test=dataclasses.replace(
            test, at_start=False, num_images=test.batch_size, num_steps=2, reward_fn={}, reward_fn_kwargs={}
        ),
        health=dataclasses.replace(options.health, probe_images=0),
        speed=dataclasses.replace(speed, compile=False, overlap_decode=False),
    )  # fmt: skip


@contextlib.contextmanager
def _seam(
    gpu: FakeGPU, options: RunOptions, model: Path, architecture: models.Architecture | None, folder: Path
) -> Iterator[list[int]]:
    """Where values enter, and the only place where the trainer's parts are replaced: weights, prompts and pictures, kernels
    of bitsandbytes, files of tensors. Rewards are ``constant_reward``; numbers read from the device ``FakeGPU.value``."""
    _write_prompts(folder / "prompts", options)
    found = policy_class(model)
    written: list[int] = []

    def from_pretrained(path: Path, *, dtype: torch.dtype, **_: Any) -> Any:
        with gpu.building():
            if architecture is None:
                return models.build(str(model), dtype, torch.device("cpu"))
            return models.pipeline_of(architecture, dtype, "cpu", random=False)

    def flatten(tensors: dict[str, torch.Tensor], *_: Any) -> dict:
        written.append(sum(t.nbytes for t in tensors.values()))
        return {}

    make_trainable = build._make_trainable

    def building(*args: Any) -> Any:
        with gpu.building():
            return make_trainable(*args)

    with contextlib.ExitStack() as stack:
        for target, name, replacement in (
            (found.pipeline_class, "from_pretrained", from_pretrained),
            (build, "_make_trainable", building),
        ):
            stack.enter_context(mock.patch.object(target, name, replacement))
        for target, replacement in {
            "paco_grpo.policies.diffusers_policy._models": lambda path, dtype: {},
            "paco_grpo.policies.diffusers_policy.quantize_layers": _quantize,
            "paco_grpo.policies.performance.quantize.missing_library": lambda: None,
            "safetensors.torch._flatten_as_ptr": flatten,
            "safetensors.torch.serialize_file": lambda data, path, metadata=None: Path(path).touch(),
        }.items():
            stack.enter_context(mock.patch(target, replacement))
        yield written


def _write_prompts(folder: Path, options: RunOptions) -> None:
    """Two prompts of the repository for each split, with a black square for an editor."""
    folder.mkdir(parents=True)
    texts = models.t2is_prompts()
    for split in ("train", "test"):
        side = (options.train if split == "train" else options.test).resolution
        rows = []
        for i in range(2):
            Image.new("RGB", (side, side)).save(folder / f"{split}{i}.png")
            rows.append({"prompt": texts[i], "image": f"{split}{i}.png"})
        (folder / f"{split}_metadata.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


@contextlib.contextmanager
def _accelerate_state() -> Iterator[None]:
    """accelerate's knowledge of devices is that of the fake GPU inside, and as before after it."""
    states = (PartialState, AcceleratorState, GradientState)
    before = [dict(state._shared_state) for state in states]
    for state in states:
        state._shared_state.clear()
    try:
        with mock.patch.object(PartialState, "default_device", property(lambda self: DEVICE)):
            yield
    finally:
        for state, values in zip(states, before, strict=True):
            state._shared_state.clear()
            state._shared_state.update(values)


# --- bitsandbytes -----------------------------------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    """x·Wᵀ with a weight that is decoded for the product alone, again in the backward pass."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return nn.functional.linear(x.to(layer.dtype), layer.decoded(), layer.bias)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.to(ctx.layer.dtype) @ ctx.layer.decoded(), None


class StoredLinear(nn.Linear):
    """Takes the memory and the kernels of bitsandbytes' layers: ``stored_bytes``, decoded for each product."""

    def __init__(self, layer: nn.Linear, kind: str, dtype: torch.dtype) -> None:
        super().__init__(1, 1, device="meta")
        self.in_features, self.out_features, self.dtype = layer.in_features, layer.out_features, dtype
        stored = layer.weight.detach().new_empty(quantize.stored_bytes(layer, kind), dtype=torch.uint8)  # fake, as the layer's
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.bias = layer.bias
        self.quantized_kind = kind

    def decoded(self) -> torch.Tensor:
        """The weight in computing precision, for one product."""
        return torch.empty(self.out_features, self.in_features, dtype=self.dtype, device=self.weight.device).zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As nn.Linear."""
        return _Product.apply(x, self)


def _quantize(module: nn.Module, kind: str, dtype: torch.dtype, device: torch.device | str) -> None:
    for name, layer in list(quantize.quantizable(module)):
        module.set_submodule(name, StoredLinear(layer, kind, dtype).to(device))
