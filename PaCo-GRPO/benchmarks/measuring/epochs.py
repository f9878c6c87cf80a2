"""One epoch of the trainer's own loop, timed and counted from outside: calls, phases, waiting, memory, FLOPs."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from measuring.architectures import Architecture
from measuring.flops import Shape, image_flops, part_flops
from measuring.peak import synchronise
from paco_grpo.training.setup import Run
from paco_grpo.training.trainer import Trainer

# Seconds of an epoch as the trainer itself writes them, by our names.
_TRAINER_TIMES = {"sampling": "time/sample_s", "reward_wait": "time/reward_wait_s", "training": "time/train_s"}


@dataclass(frozen=True)
class ProcessSettings:
    """What a run sets for the whole process, so that runs which take turns each have their own."""

    threads: int
    matmul_tf32: bool
    cudnn_tf32: bool
    cudnn_benchmark: bool

    @classmethod
    def now(cls) -> ProcessSettings:
        """As they are."""
        cudnn = torch.backends.cudnn
        return cls(torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark)

    def apply(self) -> None:
        """Set them."""
        torch.set_num_threads(self.threads)
        torch.backends.cuda.matmul.allow_tf32 = self.matmul_tf32
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = self.cudnn_tf32, self.cudnn_benchmark


class Watched:
    """A run with a trainer, whose epochs can be measured.

    Args:
        run: Built; hooks are put on its parts.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.trainer = Trainer(run)
        self.device = run.accelerator.device
        self.settings = ProcessSettings.now()
        self.calls: Counter[str] = Counter()
        self.forwards: Counter[tuple[str, int, int, bool]] = (
            Counter()
        )  # (phase, image, text tokens, gradient) -> images
        self.seconds: Counter[str] = Counter()
        self._phase = "other"
        self._detailed = False
        self._count_calls()
        self._time_rewards()
        self._time_collectives()
        self._time_phases()

    def epoch(self, detailed: bool = False) -> dict[str, Any]:
        """Run one epoch.

        Args:
            detailed: Wait for the accelerator around encoding, decoding and optimizer steps, and decode nothing in the
                background, so that each has its own seconds; whole epochs are timed without.

        Returns:
            seconds, calls, forwards (see ``flops_of``), memory, and reward_hidden (the share of the slowest reward's
            time that nobody waited for).
        """
        self.calls.clear(), self.forwards.clear(), self.seconds.clear()
        self._detailed = detailed
        self.settings.apply()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        synchronise(self.device)
        overlap = self.run.config.speed.overlap_decode
        self._set_overlap(False if detailed else overlap)
        started, worked = time.perf_counter(), time.process_time()
        self.trainer._epoch()
        synchronise(self.device)
        # cpu: of all threads of this process; on a machine that others use too it says more than the clock does
        seconds = {"epoch": time.perf_counter() - started, "cpu": time.process_time() - worked}
        self._set_overlap(overlap)
        rows = [row for row in self.run.metrics.rows() if row["phase"] == "train"]  # the main process writes them
        if rows:
            seconds |= {name: rows[-1][key] for name, key in _TRAINER_TIMES.items()}
        seconds |= {name: self.seconds[name] for name in ("reward", "collectives")}
        if detailed:
            seconds |= {name: self.seconds[name] for name in ("encode", "decode", "optimizer")}
            if rows:
                seconds["denoising"] = seconds["sampling"] - seconds["encode"] - seconds["decode"]
        forwards = [
            {"phase": phase, "image_tokens": image, "text_tokens": text, "gradient": gradient, "images": images}
            for (phase, image, text, gradient), images in sorted(self.forwards.items())
        ]
        return {
            "seconds": seconds, "calls": dict(self.calls), "forwards": forwards, "memory": self._memory(),
            "reward_hidden": rows[-1].get("time/reward_hidden_share") if rows else None,
        }  # fmt: skip

    def _set_overlap(self, chosen: bool | None) -> None:
        with self.run.config.unlocked():
            self.run.config.speed.overlap_decode = chosen

    def _memory(self) -> dict[str, float]:
        found = {"peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}  # of the process's life
        if self.device.type == "cuda":
            found["peak_gpu_mib"] = torch.cuda.max_memory_allocated(self.device) / 2**20
            found["peak_gpu_reserved_mib"] = torch.cuda.max_memory_reserved(self.device) / 2**20
        return found

    # --- hooks ------------------------------------------------------------------------------------------------------

    def _count_calls(self) -> None:
        pipeline = self.run.policy.pipeline

        def forward(module, arguments, keywords, output) -> None:
            images, tokens = keywords["hidden_states"].shape[:2]
            gradient = output[0].requires_grad
            self.calls["transformer"] += images
            self.forwards[self._phase, tokens, keywords["encoder_hidden_states"].shape[1], gradient] += images
            if gradient:
                output[0].register_hook(lambda _: self.calls.update(backward=images))

        def rows(name: str) -> Callable:
            def count(module, arguments, keywords, output) -> None:
                first = arguments[0] if arguments else keywords.get("input_ids", next(iter(keywords.values())))
                self.calls[name] += len(first)

            return count

        self.run.policy.transformer.register_forward_hook(forward, with_kwargs=True)
        for name in ("text_encoder", "text_encoder_2"):
            if (encoder := getattr(pipeline, name, None)) is not None:
                encoder.register_forward_hook(rows(name), with_kwargs=True)
        pipeline.vae.decoder.register_forward_hook(rows("decoder"), with_kwargs=True)

    def _time_rewards(self) -> None:
        def timed(reward: Callable) -> Callable:
            def score(images, items):
                with self._adding("reward"):
                    return reward(images, items)

            return score

        self.run.train_rewards = {name: timed(reward) for name, reward in self.run.train_rewards.items()}

    def _time_collectives(self) -> None:
        """Time in messages between processes: waiting for the slowest, and the sending itself."""
        accelerator = self.run.accelerator
        if accelerator.num_processes == 1:
            return
        for name in ("reduce", "gather"):
            setattr(accelerator, name, self._timed(getattr(accelerator, name), "collectives"))

    def _time_phases(self) -> None:
        policy, updater, trainer = self.run.policy, self.run.updater, self.trainer
        policy.encode = self._timed(policy.encode, "encode", detailed=True)
        policy.decode = self._timed(policy.decode, "decode", detailed=True)
        updater._optimizer_step = self._timed(updater._optimizer_step, "optimizer", detailed=True)
        trainer._sample = self._in_phase(trainer._sample, "sampling")
        trainer._update = self._in_phase(trainer._update, "training")
        trainer._while_rewards_come_in = self._in_phase(trainer._while_rewards_come_in, "training")

    def _timed(self, function: Callable, name: str, detailed: bool = False) -> Callable:
        def call(*arguments, **keywords):
            if detailed and not self._detailed:
                return function(*arguments, **keywords)
            with self._adding(name, wait=detailed):
                return function(*arguments, **keywords)

        return call

    def _in_phase(self, function: Callable, name: str) -> Callable:
        def call(*arguments, **keywords):
            before, self._phase = self._phase, name
            try:
                return function(*arguments, **keywords)
            finally:
                self._phase = before

        return call

    @contextmanager
    def _adding(self, name: str, wait: bool = False) -> Iterator[None]:
        if wait:
            synchronise(self.device)
        started = time.perf_counter()
        try:
            yield
        finally:
            if wait:
                synchronise(self.device)
            self.seconds[name] += time.perf_counter() - started


def flops_of(
    measured: dict[str, Any], architecture: Architecture, side: int, lora_rank: int, size_multiple: int
) -> dict[str, int | None]:
    """Model FLOPs of the phases of a measured epoch: the images that went through, times what one image needs.

    Args:
        measured: forwards and calls of ``Watched.epoch``.
        architecture: Of the generator.
        side: Pixels of every image, and of its reference.
        lora_rank: In training.
        size_multiple: Pixels a token side.

    Returns:
        sampling and training (the transformer), encode and decode; None where it cannot be counted.
    """
    reference = (side, side) if architecture.family != "flux" else None
    found: dict[str, int | None] = {"sampling": 0, "training": 0}
    for each in measured["forwards"]:
        shape = Shape(side, side, each["text_tokens"], reference)
        if sum(shape.image_tokens(size_multiple)) != each["image_tokens"] or each["phase"] not in found:
            return {"sampling": None, "training": None, "encode": None, "decode": None}
        flops = image_flops(architecture, shape, lora_rank)
        found[each["phase"]] += each["images"] * (flops.training if each["gradient"] else flops.forward)
    texts = {each["text_tokens"] for each in measured["forwards"]}
    parts = part_flops(architecture, Shape(side, side, max(texts), reference))
    per_text, per_image = parts["encode"], parts["decode"]
    found["encode"] = per_text and per_text * measured["calls"].get("text_encoder", 0)
    found["decode"] = per_image and per_image * measured["calls"].get("decoder", 0)
    return found
