"""Training of a judge on fake tensors; needs the package paco_reward."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paco_grpo.architectures import judge_of
from paco_grpo.estimate import fake_device
from paco_grpo.estimate.fake_device import FakeDevice, fake_cpu, measured
from paco_grpo.estimate.memory import add_gradients, bytes_of, quantized
from paco_grpo.estimate.planning import Estimate, Work
from paco_grpo.options import ConfigError

# Tokens of a pair besides its two images.
TEXT_TOKENS = 150
ANSWER_TOKENS = 100
PUBLISHED_JUDGE = (
    Path(__file__).resolve().parents[3] / "PaCo-Reward" / "config" / "paco_reward_lora.yaml"
)


def build_judge(config: dict[str, Any]) -> tuple[nn.Module, Any]:
    """The judge on ``meta``, prepared by LLaMA-Factory, and its ``ModelArguments``."""
    os.environ.setdefault("LLAMAFACTORY_VERBOSITY", "WARN")  # before it is imported
    from llamafactory.hparams import FinetuningArguments, ModelArguments
    from llamafactory.hparams.parser import _TRAIN_ARGS
    from llamafactory.model.adapter import init_adapter
    from llamafactory.model.model_utils.checkpointing import prepare_model_for_training
    from transformers import HfArgumentParser

    known = {"global_batch_size"}
    for kind in _TRAIN_ARGS:
        known |= {field.name for field in dataclasses.fields(kind)}
    unknown = [key for key in config if key not in known and not key.startswith("first_token_")]
    if unknown:
        raise ConfigError(f"LLaMA-Factory has no argument {', '.join(unknown)}")
    kinds = HfArgumentParser((ModelArguments, FinetuningArguments))
    arguments, finetuning = kinds.parse_dict(config, allow_extra_keys=True)
    half = config.get("bf16") or config.get("fp16")
    model = judge_of(arguments.model_name_or_path, torch.bfloat16 if half else torch.float32)
    prepare_model_for_training(model, arguments)
    return init_adapter(model.config, model, arguments, finetuning, is_trainable=True), arguments


def estimate_judge(config: dict[str, Any], name: str, processes: int) -> Estimate:
    """What training on pairs of the largest images costs.

    The language model runs on fake tensors. The vision tower's cost is a formula.
    """
    from paco_reward.loss import answer_positions_only, find_answers, first_token_loss_func

    model, arguments = build_judge(config)
    rows = config.get("per_device_train_batch_size", 8)
    # an image's patches, and the tokens that each square of them becomes
    vision = model.config.vision_config
    width = model.config.text_config.hidden_size
    square = vision.spatial_merge_size**2
    image_tokens = arguments.image_max_pixels // (square * vision.patch_size**2)
    patches = image_tokens * square
    tokens = min(2 * image_tokens + TEXT_TOKENS + ANSWER_TOKENS, config.get("cutoff_len", 2048))
    # the vision tower; a merger sees tokens, every other layer sees patches
    tower = next(module for part, module in model.named_modules() if part.endswith("visual"))
    weights = sum(
        p.numel() / (square if "merger" in part else 1) for part, p in tower.named_parameters()
    )
    whole = len(
        getattr(vision, "fullatt_block_indexes", range(vision.depth))
    )  # blocks that attend to the whole image
    seeing = 2 * weights * patches + 4 * whole * vision.hidden_size * patches**2
    features = 1 + len(getattr(vision, "deepstack_visual_indexes", ()))  # of a token
    pixels = 4 * patches * 3 * vision.temporal_patch_size * vision.patch_size**2
    images = 2 * rows * (pixels + 2 * image_tokens * features * width)

    labels = torch.full((rows, tokens), -100)
    labels[:, -ANSWER_TOKENS:] = 0
    weight = config.get("first_token_weight")
    scheme = config.get("first_token_scheme", "sequence")
    positions = torch.arange(tokens).expand(3, rows, tokens)
    device = FakeDevice("cpu")
    fake_device.place(model, device, "cpu")

    def learn() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=model.dtype == torch.bfloat16):
            inputs = {
                "inputs_embeds": model.get_input_embeddings()(torch.zeros_like(labels)),
                "position_ids": positions,
            }
            if weight is None:
                loss = model(**inputs, labels=labels).loss
            else:
                with answer_positions_only(
                    model.get_output_embeddings(), find_answers(labels).mask
                ):
                    outputs = {"logits": model(**inputs).logits.float()}
                loss = first_token_loss_func(outputs, labels, weight=weight, scheme=scheme)
        loss.backward()

    with fake_cpu(device):
        add_gradients(model)
        micro_batch = measured(device, learn)
    trained = bytes_of([p for p in model.parameters() if p.requires_grad])
    saved, layer = quantized([model], arguments.quantization_bit)
    resident = {
        "weights": bytes_of(model) - trained - saved,
        "trained weights": trained,
        "optimizer": trained // 2 if "8bit" in config.get("optim", "") else 2 * trained,
    }
    adds = {
        "micro-batch": {
            "images": images,
            "gradients": trained,
            "activations": micro_batch.peak + layer,
        }
    }
    pairs = 10_000 / processes
    work = [Work("see", 2 * pairs, seeing), Work.of("learn", pairs / rows, micro_batch)]
    title = f"{name} on {processes} GPU(s): pairs of {tokens} tokens, {rows} at a time on each"
    return Estimate(title, {"10,000 pairs": work}, resident, adds)
