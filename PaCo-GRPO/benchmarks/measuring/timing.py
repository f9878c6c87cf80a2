"""Epochs of a run, timed and counted through hooks on its modules: seconds, calls, FLOPs, memory."""

from __future__ import annotations

import resource
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flops import Shape, image_flops, part_flops
from measuring.report import summary
from paco_grpo.rehearsal.architectures import Architecture
from paco_grpo.training.trainer import Trainer

# Names in metrics.jsonl -> ours.
_TRAINER_SECONDS = {
    "time/epoch_s": "epoch", "time/sample_s": "sampling", "time/reward_wait_s": "reward_wait", "time/train_s": "training",
}  # fmt: skip
_MATMUL_SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192, 16384)}


@dataclass
class _Call:
    """One call of a part of the model: ``images`` (or texts) that passed through it, between two marks."""

    part: str
    started: float  # seconds since the epoch began, on the host's clock
    marks: tuple[Any, Any]
    images: int = 0
    tokens: tuple[int, int] = (0, 0)  # image (with reference), text
    gradient: bool = False

    def seconds(self) -> float:
        """On a GPU the time of its stream, else of the clock."""
        start, end = self.marks
        return start.elapsed_time(end) / 1000 if isinstance(start, torch.cuda.Event) else end - start


class EpochMeter:
    """Runs the epochs of a run one by one and measures each, through hooks on its modules."""

    def __init__(self, run: Any) -> None:
        self.run, self.trainer = run, Trainer(run)
        self.device = run.accelerator.device
        self._calls: list[_Call] = []
        self._handles: list[Any] = []
        self._waiting = self._began = 0.0
        pipeline = run.state.policy.pipeline
        parts = {"transformer": run.state.policy.transformer, "vae_encoder": pipeline.vae.encoder, "decoder": pipeline.vae.decoder}
        for name in ("text_encoder", "text_encoder_2"):
            parts[name] = getattr(pipeline, name, None)
        for name, module in parts.items():
            if module is not None:
                self._watch(module, name)
        begun: list[tuple[float, Any]] = []
        self._handles.append(register_optimizer_step_pre_hook(lambda *_: begun.append(self._now())))
        self._handles.append(register_optimizer_step_post_hook(lambda *_: self._ended("optimizer", begun.pop())))
        strategy = run.state.strategy
        strategy.backward = partial(self._backward, strategy.backward)
        if run.accelerator.num_processes > 1:
            for name in ("reduce", "gather"):
                setattr(run.accelerator, name, partial(self._timed, getattr(run.accelerator, name)))

    def epoch(self) -> list[dict[str, Any]]:
        """Run one epoch.

        Returns:
            For every process, on the main one: seconds, calls, forwards (the transformer's, see ``flops_of``), memory
            (peak MiB; the resident set is the peak of the whole process), and the row of metrics.jsonl as ``metrics``.
        """
        self._calls, self._waiting = [], 0.0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        synchronize(self.device)
        worked, self._began = time.process_time(), time.perf_counter()
        self.trainer._epoch()
        synchronize(self.device)
        mine = {"cpu": time.process_time() - worked, "waiting": self._waiting,
                "calls": self._calls, "memory": {"peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}}  # fmt: skip
        if self.device.type == "cuda":
            mine["memory"]["peak_gpu_mib"] = torch.cuda.max_memory_allocated(self.device) / 2**20
            mine["memory"]["peak_gpu_reserved_mib"] = torch.cuda.max_memory_reserved(self.device) / 2**20
        for call in self._calls:  # events of a GPU cannot leave their process
            call.marks = (0.0, call.seconds())
        found = gather_object([mine])
        if not self.run.accelerator.is_main_process:
            return []
        row = [row for row in self.run.metrics.rows() if row["phase"] == "train"][-1]
        return [_of_process(each, row) for each in found]

    def close(self) -> None:
        """Remove the hooks and close the run."""
        for handle in self._handles:
            handle.remove()
        self.run.close()

    # --- hooks --------------------------------------------------------------------------------------------------------

    def _now(self) -> tuple[float, Any]:
        """Seconds since the epoch began, and a mark: an event of a GPU's stream, or the clock."""
        clock = time.perf_counter()
        if self.device.type != "cuda":
            return clock - self._began, clock
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return clock - self._began, event

    def _ended(self, part: str, begun: tuple[float, Any]) -> _Call:
        call = _Call(part, begun[0], (begun[1], self._now()[1]))
        self._calls.append(call)
        return call

    def _watch(self, module: torch.nn.Module, part: str) -> None:
        # by thread, since decoding may overlap sampling; a stack, since the published work calls inside a call
        begun: defaultdict[int, list[tuple[float, Any]]] = defaultdict(list)

        def before(_module, _arguments, _keywords) -> None:
            begun[threading.get_ident()].append(self._now())

        def after(_module, arguments, keywords, output) -> None:
            call = self._ended(part, begun[threading.get_ident()].pop())
            if part != "transformer":
                first = arguments[0] if arguments else keywords.get("input_ids", next(iter(keywords.values())))
                call.images = len(first)
                return
            call.images, image_tokens = keywords["hidden_states"].shape[:2]
            call.tokens = image_tokens, keywords["encoder_hidden_states"].shape[1]
            if output[0].requires_grad:
                call.gradient = True
                output[0].register_hook(lambda _: self._calls.append(_Call("backward", 0.0, (0.0, 0.0), call.images)))

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    def _backward(self, backward: Callable, *arguments, **keywords) -> None:
        begun = self._now()
        backward(*arguments, **keywords)
        self._ended("gradient", begun)

    def _timed(self, function: Callable, *arguments, **keywords) -> Any:
        """Call ``function``, adding its seconds to the time spent waiting for other processes."""
        started = time.perf_counter()
        try:
            return function(*arguments, **keywords)
        finally:
            self._waiting += time.perf_counter() - started


def _of_process(found: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    seconds = {ours: row[name] for name, ours in _TRAINER_SECONDS.items()}
    seconds |= {"cpu": found["cpu"], "collectives": found["waiting"]}
    seconds |= dict.fromkeys(("encode", "denoising", "decode", "forward", "gradient", "optimizer"), 0.0)
    calls: Counter[str] = Counter()
    forwards: Counter[tuple] = Counter()
    # each process has its clock; the last batch is decoded after all denoising and before any training
    last_decode = max((call.started for call in found["calls"] if call.part == "decoder"), default=0.0)
    parts = {"text_encoder": "encode", "text_encoder_2": "encode", "vae_encoder": "encode", "decoder": "decode",
             "gradient": "gradient", "optimizer": "optimizer"}  # fmt: skip
    for call in found["calls"]:
        if call.part not in ("gradient", "optimizer"):
            calls[call.part] += call.images
        if call.part == "transformer":
            phase = "sampling" if call.started < last_decode else "training"
            forwards[phase, *call.tokens, call.gradient] += call.images
            seconds["denoising" if phase == "sampling" else "forward"] += call.seconds()
        elif call.part in parts:
            seconds[parts[call.part]] += call.seconds()
    names = ("phase", "image_tokens", "text_tokens", "gradient", "images")
    return {
        "seconds": seconds, "calls": dict(calls), "memory": found["memory"], "metrics": row,
        "forwards": [dict(zip(names, (*key, images), strict=True)) for key, images in sorted(forwards.items())],
    }  # fmt: skip


# --- what follows from the epochs -------------------------------------------------------------------------------------


def result_of(epochs: Sequence[list[dict]], flops: dict[str, int | None], peak: float) -> dict[str, Any]:
    """Medians, rates and memory of ``EpochMeter.epoch``; ``flops`` is of ``flops_of``, ``peak`` FLOP/s of one device."""
    every = [each[0]["seconds"] for each in epochs]
    seconds = {name: summary([row[name] for row in every]) for name in every[0]}
    medians = {name: found["median"] for name, found in seconds.items()}
    forwards = [forward for process in epochs[-1] for forward in process["forwards"]]
    rates: dict[str, float | None] = {}
    for phase in ("sampling", "training"):
        tokens = sum(f["images"] * f["image_tokens"] for f in forwards if f["phase"] == phase)
        rates[f"{phase}_tokens_per_second"] = tokens / medians[phase] if medians[phase] else None
    counted = flops | {"denoising": flops["sampling"], "epoch": None}
    if flops["sampling"] is not None:
        counted["epoch"] = sum(value for value in flops.values() if value is not None)
    for phase in ("denoising", "sampling", "training", "epoch"):
        took = medians[phase] * peak * len(epochs[-1])
        rates[f"{phase}_mfu"] = counted[phase] / took if counted[phase] is not None and took else None
    hidden = [each[0]["metrics"].get("time/reward_overlap_fraction") for each in epochs]
    rates["reward_hidden"] = summary(hidden)["median"]
    waited = [process["seconds"]["collectives"] / process["seconds"]["epoch"] for each in epochs for process in each]
    rates["collectives_share"] = summary(waited)["median"]
    memory = {name: max(p["memory"][name] for each in epochs for p in each) for name in epochs[0][0]["memory"]}
    calls = sum((Counter(process["calls"]) for process in epochs[-1]), Counter())
    found = {"seconds": seconds, "calls": dict(calls), "flops": flops, "rates": rates}
    return found | {"memory": memory, "epochs": epochs}


def flops_of(
    epoch: Sequence[dict[str, Any]], architecture: Architecture, side: int, lora_rank: int, size_multiple: int
) -> dict[str, int | None]:
    """Model FLOPs of an ``EpochMeter.epoch``: images that passed through each part, times what one image needs.

    Args:
        side: Pixels of every image, and of its reference.
        size_multiple: Pixels along one side of a token.

    Returns:
        ``sampling`` and ``training`` (the transformer), ``encode`` and ``decode``; None where they cannot be counted.
    """
    forwards = [forward for process in epoch for forward in process["forwards"]]
    expected = (side // size_multiple) ** 2 * (1 + architecture.editing)
    if any(each["image_tokens"] != expected for each in forwards):
        return dict.fromkeys(("sampling", "training", "encode", "decode"))
    found: dict[str, int | None] = {"sampling": 0, "training": 0}
    for each in forwards:
        flops = image_flops(architecture, Shape(1, side, side, each["text_tokens"]), lora_rank)
        found[each["phase"]] += each["images"] * (flops.training if each["gradient"] else flops.forward)
    parts = part_flops(architecture, Shape(1, side, side, max(each["text_tokens"] for each in forwards)))
    for name, part in (("encode", "text_encoder"), ("decode", "decoder")):
        images = sum(process["calls"].get(part, 0) for process in epoch)
        found[name] = None if parts[name] is None else parts[name] * images
    return found


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.25) -> dict[str, Any]:
    """FLOP/s of ``torch.matmul`` on large square matrices, the best of several sizes and repeats.

    Args:
        device: With its current number of threads and TF32 setting.
        seconds: For each size, at least three products.
    """
    by_size = {}
    for size in _MATMUL_SIZES[device.type]:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        best, begun, rounds = float("inf"), time.perf_counter(), 0
        torch.matmul(a, b)  # warm-up
        while rounds < 3 or time.perf_counter() - begun < seconds:
            synchronize(device)
            started = time.perf_counter()
            torch.matmul(a, b)
            synchronize(device)
            best, rounds = min(best, time.perf_counter() - started), rounds + 1
        by_size[str(size)] = 2 * size**3 / best
    return {
        "flops_per_second": max(by_size.values()), "by_size": by_size, "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
    }  # fmt: skip


def profile_of(meter: EpochMeter, trace: Path, rows: int = 30) -> dict[str, Any]:
    """The operations that take most of one epoch under torch.profiler, in milliseconds; a Chrome trace goes to ``trace``.

    Give it a small epoch (one batch, few steps): every operation is recorded.
    """
    from torch.profiler import ProfilerActivity, profile

    cuda = meter.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiler:
        meter.epoch()
    trace.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(trace))
    name = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: getattr(event, name), reverse=True)
    total = sum(getattr(event, name) for event in events)
    operations = []
    for event in events[:rows]:
        took = getattr(event, name)
        operations.append({"name": event.key, "calls": event.count, "ms": took / 1000, "share": took / total})
    return {"total_ms": total / 1000, "operations": operations}
