"""Judge training on a fake GPU: LLaMA-Factory's own run with our overlay, one micro-batch of the largest pair.

The data pipeline, the patched model, the adapter, the trainer with the first-token loss, gradient checkpointing, the
optimizer and saving are LLaMA-Factory's and ours. Replaced: weights, bitsandbytes' layers, files of tensors. The judge's
training package is imported when a rehearsal begins, never with this module.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from PIL import Image
from torch import nn

from paco_grpo.rehearsal import models
from paco_grpo.rehearsal.architectures import PRESETS, QWEN2_5_VL_7B, QWEN3_VL_4B, QWEN3_VL_8B
from paco_grpo.rehearsal.epoch import StoredLinear, Work, _accelerate_state
from paco_grpo.rehearsal.fake_gpu import Counts, FakeGPU, Phase
from paco_grpo.rehearsal.plan import GIB, GPU, RESERVE, seconds
from paco_grpo.rehearsal.report import _parts

ANSWER_TOKENS = 100  # of a verdict and its reasons
# By hub name; of other models a folder with their config.json is needed.
BASES = {
    "Qwen/Qwen2.5-VL-7B-Instruct": QWEN2_5_VL_7B,
    "Qwen/Qwen3-VL-4B-Instruct": QWEN3_VL_4B,
    "Qwen/Qwen3-VL-8B-Instruct": QWEN3_VL_8B,
}


@dataclass
class JudgeRehearsal:
    """What one process of a judge's training does and holds.

    Attributes:
        name: Of the configuration.
        rows: Pairs of a micro-batch.
        micro_batches: Of an optimizer step.
        sequences: Pairs of an optimizer step over all processes.
        tokens: Of a pair, images included.
        work: Of an optimizer step.
        resident: Bytes that stay on the device, by part.
        adds: Bytes that a phase adds at its peak, by part.
        notes: What was not run, and how it was computed instead.
    """

    name: str
    rows: int
    micro_batches: int
    sequences: int
    tokens: int
    work: list[Work]
    resident: dict[str, int]
    adds: dict[str, dict[str, int]]
    notes: list[str]

    @property
    def peak(self) -> int:
        """Bytes on the device at the highest peak."""
        return sum(self.resident.values()) + max(sum(parts.values()) for parts in self.adds.values())

    def step_seconds(self, gpu: GPU) -> float:
        """Predicted seconds of an optimizer step."""
        return sum(work.epoch * seconds(work.each, gpu) for work in self.work)

    def left(self, gpu: GPU) -> float:
        """Bytes left on the card at the highest peak; negative: it does not fit."""
        return gpu.memory - RESERVE - self.peak

    def text(self, gpu: GPU, gpu_name: str) -> str:
        """Work, memory and verdict."""
        lines = [
            f"{self.name} on {gpu_name}: steps of {self.sequences} pairs of {self.tokens} tokens",
            f"{self.rows} x {self.micro_batches} of them on each GPU",
            "",
            f"{'a step':<10} {'pieces':>6} {'TFLOP':>8} {'GB moved':>9} {'kernels':>8} {'s each':>8} {'s':>8}",
        ]
        for work in self.work:
            each, took = work.each, seconds(work.each, gpu)
            lines.append(
                f"{work.name:<10} {work.epoch:>6.0f} {each.flops / 1e12:>8.1f} {each.bytes / 1e9:>9.1f} "
                f"{each.kernels:>8} {took:>8.3f} {work.epoch * took:>8.1f}"
            )
        step = self.step_seconds(gpu)
        lines.append(f"{step:.1f} s a step, {step / self.sequences * 10_000 / 3600:.1f} h for 10,000 pairs")
        lines += ["", "GiB on a GPU", "resident: " + _parts(self.resident)]
        lines += [f"{phase:<10} + {_parts(parts)}" for phase, parts in self.adds.items()]
        spare = self.left(gpu) / GIB
        verdict = f"fits: {spare:.1f} GiB of" if spare >= 0 else f"does not fit: {-spare:.1f} GiB too much for"
        end = f"{verdict} {gpu_name}{' are left' if spare >= 0 else ''}"
        lines += ["", *(f"note: {note}" for note in self.notes)]
        lines.append(f"{end} at a peak of {self.peak / GIB:.1f} GiB + {RESERVE / GIB:.1f} for CUDA itself")
        return "\n".join(lines)


def rehearse_judge(
    file: Path, overrides: Sequence[str] = (), processes: int = 1, pixels: int | None = None, blocks: int | None = None
) -> JudgeRehearsal:
    """Run one optimizer step with one pair of the largest images.

    Args:
        file: Of a training configuration (PaCo-Reward/config).
        overrides: ``key=value``.
        processes: GPUs.
        pixels: Of each image; None = ``image_max_pixels``, the largest.
        blocks: Blocks of each tower instead of all (fast, for tests).

    Raises:
        Exception: Whatever the code raises on a GPU.
        PacoRewardError: The configuration is wrong.
    """
    from llamafactory.train.tuner import run_exp

    from paco_reward import overlay
    from paco_reward.config import check_combinations, load_config, with_accumulation
    from paco_reward.families import with_template

    overlay.install()
    config = load_config(file, overrides)
    check_combinations(config)
    config = with_accumulation(config, processes)
    rows = config.get("per_device_train_batch_size", 8)
    micro_batches = config.get("gradient_accumulation_steps", 1)
    side = int(math.sqrt(pixels or config.get("image_max_pixels", 768 * 768)))
    notes = [f"one pair was run; a micro-batch is {rows} times that"] if rows > 1 else []
    bits = config.pop("quantization_bit", None)
    if bits:
        notes.append("bitsandbytes' layers are computed, not run")
    with tempfile.TemporaryDirectory(prefix="rehearse-judge-") as place, _accelerate_state():
        folder = Path(place)
        _write_model(_base_config(config.get("model_name_or_path"), blocks), folder / "model")
        _write_pair(folder / "data", side)
        small = config | {
            "model_name_or_path": str(folder / "model"), "dataset_dir": str(folder / "data"), "dataset": "pair",
            "output_dir": str(folder / "out"), "max_steps": 1, "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 1, "preprocessing_num_workers": None, "dataloader_num_workers": 0,
            "dataloader_pin_memory": False, "save_strategy": "no", "plot_loss": False, "logging_steps": 1, "report_to": "none",
            "disable_tqdm": True, "eval_strategy": "no", "eval_dataset": None, "cutoff_len": 1 << 17,
        }  # fmt: skip
        kind = {4: "nf4", 8: "int8"}.get(bits)
        printed = contextlib.redirect_stdout(io.StringIO())  # an example of the data, thousands of tokens long
        with FakeGPU() as gpu, _seam(gpu, kind) as seen, gpu.recording(), printed:
            run_exp(with_template(small))
    return _scaled(gpu.meter.phases, seen, Path(file).stem, rows, micro_batches, processes, notes)


def report(
    file: Path, overrides: Sequence[str], processes: int, pixels: int | None, gpu: GPU, gpu_name: str, blocks: int | None = None
) -> int:
    """Print the rehearsal; returns the exit status of scripts/rehearse.py."""
    from paco_reward.errors import PacoRewardError

    try:
        found = rehearse_judge(file, overrides, processes, pixels, blocks)
    except PacoRewardError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:  # noqa: BLE001 - whatever the libraries raise on this GPU is the finding
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}:{frame.lineno}"
        print(f"{file.stem} fails on a GPU: {type(error).__name__}: {error}\n  at {where}", file=sys.stderr)
        return 1
    print(found.text(gpu, gpu_name))
    return 0 if found.left(gpu) >= 0 else 1


def _base_config(model: str | None, blocks: int | None) -> Any:
    """Configuration of a base model, with ``blocks`` in each tower; special tokens as in the rehearsal's tokenizer.

    Raises:
        PacoRewardError: Neither one of ``BASES`` nor a folder with a config.json.
    """
    import transformers

    from paco_reward.errors import PacoRewardError

    if module := BASES.get(model or ""):
        kind = getattr(transformers, module.kind)
        config = kind.config_class(**module.config).to_dict() | {"architectures": [module.kind]}
    elif Path(model or "", "config.json").is_file():
        config = transformers.AutoConfig.from_pretrained(model).to_dict()
        kind = getattr(transformers, config["architectures"][0])
        config |= {key: value for key, value in QWEN2_5_VL_7B.config.items() if key.endswith("_token_id")}
        config["text_config"] |= {
            key: value for key, value in QWEN2_5_VL_7B.config["text_config"].items() if key.endswith("_token_id")
        }
    else:
        raise PacoRewardError(
            f"the sizes of {model} are not known here ({', '.join(BASES)}); set model_name_or_path= to a folder with its "
            "config.json"
        )
    if blocks is not None:
        config["text_config"].pop("layer_types", None)  # follows from their number
        config["text_config"]["num_hidden_layers"] = blocks
        vision = config["vision_config"]
        vision |= {"depth": blocks}
        vision |= {key: [blocks - 1] for key in ("fullatt_block_indexes", "deepstack_visual_indexes") if key in vision}
    return kind.config_class.from_dict(config)


def _write_model(config: Any, folder: Path) -> None:
    """Configuration, tokenizer and processor."""
    from transformers import Qwen2VLImageProcessor

    config.save_pretrained(folder)
    tokens = PRESETS["qwen-edit"].tokenizers["processor"]
    encoder = SimpleNamespace(config=config)
    processor = models.PROCESSORS[tokens.processor](models._tokenizer(tokens), {"text_encoder": encoder})
    vision = config.vision_config
    side = vision.patch_size * vision.spatial_merge_size  # of a token
    processor.image_processor = Qwen2VLImageProcessor(
        patch_size=vision.patch_size, merge_size=vision.spatial_merge_size, temporal_patch_size=2,
        size={"shortest_edge": side * side * 4, "longest_edge": side * side * 16384},  # as published
    )  # fmt: skip
    processor.save_pretrained(folder)


def _write_pair(folder: Path, side: int) -> None:
    """A data set with one question about two pictures, answered in ``ANSWER_TOKENS`` words."""
    folder.mkdir(parents=True)
    for name in "ab":
        Image.new("RGB", (side, side)).save(folder / f"{name}.png")
    question = "<image><image>" + models.t2is_prompts()[0]
    answer = "Yes. " + "because " * (ANSWER_TOKENS - 2)
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    (folder / "pair.json").write_text(json.dumps([{"messages": turns, "images": ["a.png", "b.png"]}]))
    info = {
        "file_name": "pair.json", "formatting": "sharegpt", "columns": {"messages": "messages", "images": "images"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    }  # fmt: skip
    (folder / "dataset_info.json").write_text(json.dumps({"pair": info}))


@contextlib.contextmanager
def _seam(gpu: FakeGPU, kind: str | None) -> Iterator[dict[str, Any]]:
    """Where values enter: weights, bitsandbytes' layers, files of tensors. Yields what the phases leave."""
    from accelerate import Accelerator
    from llamafactory.train.sft import workflow
    from transformers import AutoModelForImageTextToText
    from transformers.utils.import_utils import is_torch_bf16_gpu_available

    seen: dict[str, Any] = {"after_forward": []}
    trainer, meter = workflow.CustomSeq2SeqTrainer, gpu.meter

    def from_pretrained(config: Any, **_: Any) -> nn.Module:
        with models._default_dtype(torch.bfloat16):
            model = AutoModelForImageTextToText.from_config(config)
        for name, layer in list(model.named_modules()) if kind else ():
            if type(layer) is nn.Linear and name != "lm_head":
                model.set_submodule(name, StoredLinear(layer, kind, torch.bfloat16))
        return model

    def load_model(*args: Any, **kwargs: Any) -> nn.Module:
        with gpu.building():
            return original_load(*args, **kwargs)

    def step(self: Any, model: nn.Module, inputs: dict[str, torch.Tensor], *more: Any) -> torch.Tensor:
        if "resident" not in seen:
            state = seen["state"] = [p for p in model.parameters() if p.requires_grad]
            frozen = [t for t in (*model.parameters(), *model.buffers()) if not t.requires_grad]
            seen["resident"] = {
                "weights": sum(t.nbytes for t in frozen),
                "adapter": sum(t.nbytes for t in state),
                "optimizer": 2 * sum(t.nbytes for t in state),
            }
            seen["tokens"] = inputs["input_ids"].shape[1]
            seen["before"] = meter.now
        return original_step(self, model, inputs, *more)

    def loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        with meter.phase("forward"):
            made = original_loss(self, *args, **kwargs)
        seen["after_forward"].append(meter.now)
        return made

    original_load, original_step, original_loss = workflow.load_model, trainer.training_step, trainer.compute_loss
    backward, optimize = Accelerator.backward, torch.optim.AdamW.step
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in (
            (AutoModelForImageTextToText, "from_pretrained", from_pretrained), (workflow, "load_model", load_model),
            (workflow, "create_modelcard_and_push", lambda *args: None), (trainer, "training_step", step),
            (trainer, "compute_loss", loss),
            (Accelerator, "backward", meter.during("backward", backward)),
            (torch.optim.AdamW, "step", meter.during("optimizer", optimize)),
            (trainer, "save_model", lambda self, *a, **k: None),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(mock.patch("torch.cuda.set_device", lambda *args: None))
        stack.enter_context(mock.patch("llamafactory.extras.misc._is_bf16_available", True))
        is_torch_bf16_gpu_available.cache_clear()  # was asked before there was a GPU
        stack.callback(is_torch_bf16_gpu_available.cache_clear)
        yield seen


def _scaled(
    phases: dict[str, Phase], seen: dict[str, Any], name: str, rows: int, micro_batches: int, processes: int, notes: list
) -> JudgeRehearsal:
    """From one pair to a step."""
    gradients = sum(t.nbytes for t in seen["state"])
    before, saved = seen["before"], seen["after_forward"][0]

    def counts(phase: str) -> Counts:
        return phases[phase].counts

    kept = saved - before
    top = max(0, phases["backward"].peak - before - kept - gradients)
    forward = max(0, phases["forward"].peak - before - kept)
    work = [
        Work("forward", counts("forward").times(rows), micro_batches),
        Work("backward", counts("backward").times(rows), micro_batches),
        Work("optimizer", counts("optimizer"), 1),
    ]
    held = {"gradients": gradients, "kept for backward": rows * kept}
    adds = {"forward": held | {"forward": rows * forward}, "backward": held | {"backward": rows * top}}
    return JudgeRehearsal(
        name, rows, micro_batches, rows * micro_batches * processes, seen["tokens"], work, seen["resident"], adds, notes
    )
