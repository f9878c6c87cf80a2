"""A step of judge training at the size of Qwen2.5-VL-7B on a fake GPU.

A micro-batch is pairs of two pictures of the largest size. The vision tower has two blocks: it is
frozen, and takes no part in the peak.
"""

import os
from typing import Any

os.environ["LLAMAFACTORY_VERBOSITY"] = "WARN"  # before it is imported

import torch
import transformers
from fake_gpu import GIB, GRPO, ON_GPU, fake_gpu, kind
from llamafactory.hparams import FinetuningArguments, ModelArguments
from llamafactory.model.adapter import init_adapter
from llamafactory.model.model_utils.checkpointing import prepare_model_for_training
from transformers import HfArgumentParser

from paco_grpo.architectures import KNOWN
from paco_grpo.estimate import fake_device
from paco_reward.config import load_config
from paco_reward.loss import answer_positions_only, find_answers, first_token_loss_func
from paco_reward.overlay import (
    compute_frozen_towers_without_gradients,
    leave_casts_to_autocast,
)

CONFIG = GRPO.parent / "PaCo-Reward" / "config" / "paco_reward_lora.yaml"
TEXT = 150  # tokens of a question
ANSWER = 100  # tokens of an answer


def build(config, blocks, gpu):
    """The judge with its LoRA, as LLaMA-Factory prepares it, on the GPU."""
    _, values = KNOWN["Qwen/Qwen-Image"].modules["text_encoder"]
    text = values["text_config"] | {"num_hidden_layers": blocks}
    vision = values["vision_config"] | {"depth": 2, "fullatt_block_indexes": [0, 1]}
    values = values | {"text_config": text, "vision_config": vision}
    judge_config = transformers.Qwen2_5_VLConfig(**values)
    parser = HfArgumentParser((ModelArguments, FinetuningArguments))
    arguments, finetuning = parser.parse_dict(config, allow_extra_keys=True)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = transformers.Qwen2_5_VLForConditionalGeneration(judge_config)
        torch.set_default_dtype(torch.float32)
        prepare_model_for_training(model, arguments)
        model = init_adapter(judge_config, model, arguments, finetuning, is_trainable=True)
    compute_frozen_towers_without_gradients(model)
    leave_casts_to_autocast(model)
    fake_device.place(model, gpu, "cuda:0")
    return model.train()


def batch_of(model, config, rows):
    """Inputs on the GPU, and labels."""
    vision = model.config.vision_config
    cell = vision.spatial_merge_size * vision.patch_size
    side = int((config["image_max_pixels"] / cell**2) ** 0.5)  # tokens along a picture
    grid = torch.tensor([[1, vision.spatial_merge_size * side, vision.spatial_merge_size * side]])
    pixels = 3 * vision.temporal_patch_size * vision.patch_size**2
    length = 2 * (side**2 + 2) + TEXT + ANSWER
    ids = torch.full((rows, length), 8)
    picture = [model.config.vision_start_token_id, *[model.config.image_token_id] * side**2]
    picture.append(model.config.vision_end_token_id)
    ids[:, : 2 * len(picture)] = torch.tensor(picture * 2)
    labels = torch.full_like(ids, -100)
    labels[:, -ANSWER:] = 8
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "image_grid_thw": grid.repeat(2 * rows, 1),
        "pixel_values": torch.empty(2 * rows * int(grid.prod()), pixels),
        "mm_token_type_ids": (ids == model.config.image_token_id).long(),
    }
    return {name: tensor.to("cuda:0") for name, tensor in inputs.items()}, labels.to("cuda:0")


def main(blocks: int, rows: int) -> dict[str, Any]:
    """Two micro-batches of ``rows`` and an optimizer step, after one that made the moments."""
    config = load_config(CONFIG)
    with fake_gpu(79.2) as gpu:
        model = build(config, blocks, gpu)
        weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=config["learning_rate"], fused=True)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        inputs, labels = batch_of(model, config, rows)
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16):
                mask = find_answers(labels).mask
                with answer_positions_only(model.get_output_embeddings(), mask):
                    logits = model(**inputs).logits.float()
            loss = first_token_loss_func({"logits": logits}, labels, weight=0.1, scheme="sequence")
            loss.backward()
            del logits, loss
        assert {kind(parameter.grad) for parameter in trained} == {ON_GPU}
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        moments = [value for values in optimizer.state.values() for value in values.values()]
        assert {kind(tensor) for tensor in (*trained, *moments)} == {ON_GPU}
        frozen = {kind(p) for p in model.parameters() if not p.requires_grad}
        assert frozen == {"torch.bfloat16 cuda:0"}
    return {"trained": len(trained), "peak_gib": (weights + gpu.peak) / GIB}
