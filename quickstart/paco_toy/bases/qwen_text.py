"""The toy Qwen-Image-Edit's text encoder: a small Qwen2.5-VL that reads a scene and an instruction.

QwenImageEditPipeline wraps every instruction in a fixed text of its own and drops the features of the first 64 tokens. The
tokenizer here has every word of that text and of the instructions as one token, so those 64 tokens end before the image, as
with Qwen's own; a scene is four image tokens, one a panel.
"""

from __future__ import annotations

import json
import logging
import time

import numpy as np
import torch
from diffusers import QwenImageEditPipeline
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from paco_toy.bases.edit_batches import VALUES, EditBatch, draw_edits, draw_pixels
from paco_toy.bases.judge import SPECIAL_TOKENS
from paco_toy.bases.panels import PanelCache
from paco_toy.world import COLOURS, SHAPES, STYLES, VIEWS

logger = logging.getLogger(__name__)

WIDTH = 96
NO_INSTRUCTION = " "  # what true CFG compares with
_IMAGE_PIXELS = 56 * 56  # every scene becomes 4 x 4 patches of 14 px, merged to 4 tokens
# Features that the pipeline keeps: vision start, four panels, vision end, "make", "the", shape, value, end of the turn.
_PANELS, _SHAPE, _VALUE = slice(1, 5), 8, 9


def prompt_template() -> tuple[str, int]:
    """The pipeline's text around an instruction, and how many of its tokens the pipeline drops."""
    pipeline = QwenImageEditPipeline(None, None, None, None, None, None)
    return pipeline.prompt_template_encode, pipeline.prompt_template_encode_start_idx


def new_editor_processor() -> Qwen2VLProcessor:
    """Byte-level BPE with one token a word, Qwen's special tokens, and the image processor fixed to 56 x 56 px."""
    template, _ = prompt_template()
    instructions = [f"make the {shape} {value}" for shape in SHAPES for value in VALUES]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = Qwen2Tokenizer(vocab={"<|endoftext|>": 0}, merges=[])._tokenizer.pre_tokenizer
    plain = template.format("")
    for special in SPECIAL_TOKENS:
        plain = plain.replace(special, "\0")
    texts = [*plain.split("\0"), *instructions, NO_INSTRUCTION]
    # No limit that matters: merging ends when every word is one token.
    trainer = trainers.BpeTrainer(
        vocab_size=4096, min_frequency=1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator(texts, trainer)
    model = json.loads(trained.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"], merges=[tuple(m) for m in model["merges"]], eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL_TOKENS), model_max_length=2048,
    )  # fmt: skip
    size = {"shortest_edge": _IMAGE_PIXELS, "longest_edge": _IMAGE_PIXELS}
    options = {
        "size": size,
        "min_pixels": _IMAGE_PIXELS,
        "max_pixels": _IMAGE_PIXELS,
        "patch_size": 14,
        "merge_size": 2,
    }
    return Qwen2VLProcessor(
        Qwen2VLImageProcessor(**options), tokenizer, Qwen2VLVideoProcessor(**options), chat_template=""
    )


def new_text_encoder(tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """An untrained Qwen2.5-VL of 0.4 M parameters, with the wide initialiser of the toy judge."""
    torch.manual_seed(seed)
    names = ("image_pad", "video_pad", "vision_start", "vision_end", "endoftext")
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": WIDTH, "intermediate_size": 192, "num_hidden_layers": 2,
            "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 2048, "tie_word_embeddings": True,
            "initializer_range": 0.06,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            "bos_token_id": ids["endoftext"], "eos_token_id": tokenizer.eos_token_id, "pad_token_id": ids["endoftext"],
        },
        vision_config={
            "depth": 2, "hidden_size": 48, "intermediate_size": 96, "num_heads": 3, "out_hidden_size": WIDTH, "patch_size": 14,
            "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [1], "initializer_range": 0.06,
        },
        image_token_id=ids["image_pad"], video_token_id=ids["video_pad"], vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"], tie_word_embeddings=True, initializer_range=0.06,
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config)


class SceneReader:
    """Features of (scene, instruction) as QwenImageEditPipeline makes them, for batches of instructions of one length."""

    def __init__(self, encoder: Qwen2_5_VLForConditionalGeneration, processor: Qwen2VLProcessor):
        self.encoder, self.processor = encoder, processor
        self.template, self.dropped = prompt_template()
        self._ids: dict[str, list[int]] = {}

    def _tokens(self, instruction: str) -> list[int]:
        if instruction not in self._ids:
            text = self.template.format(instruction).replace("<|image_pad|>", "<|image_pad|>" * 4)
            self._ids[instruction] = self.processor.tokenizer(text).input_ids
        return self._ids[instruction]

    def __call__(self, pixels: np.ndarray, instructions: list[str]) -> torch.Tensor:
        """Features (B, L, D) for uint8 scenes (B, S, S, 3)."""
        images = self.processor.image_processor(
            images=torch.from_numpy(pixels).permute(0, 3, 1, 2), return_tensors="pt"
        )
        ids = torch.tensor([self._tokens(text) for text in instructions])
        # Only what the pipeline passes on: without mm_token_type_ids every token has one position, image tokens too.
        hidden = self.encoder.model(
            input_ids=ids, attention_mask=torch.ones_like(ids), **images, use_cache=False
        ).last_hidden_state  # fmt: skip
        return hidden[:, self.dropped :]


def pretrain_reader(
    reader: SceneReader, caches: dict[int, PanelCache], seconds: float, seed: int, batch: int = 32, lr: float = 2e-3
) -> dict[str, float]:
    """Teaches the encoder to read scenes and instructions before anything is drawn, as Qwen2.5-VL has been.

    The panels' tokens come to know what each shows. The shape's token comes to know the shape and which panel holds it, the
    value's token also the value and the other attribute and view of that panel. Linear probes learn along and are thrown away.

    Args:
        caches: panel side in pixels -> panels.
    Returns:
        What share of each the probes read rightly towards the end.
    """
    torch.manual_seed(seed + 7)
    rng = np.random.default_rng([seed, 4])
    world = {"style": len(STYLES), "colour": len(COLOURS), "shape": len(SHAPES), "view": len(VIEWS)}
    counts = {f"panel {n}": c for n, c in world.items()} | {f"there {n}": c for n, c in world.items()}
    counts |= {"panel place": 4, "asked shape": len(SHAPES), "place": 4, "value": len(VALUES)}
    probes = nn.ModuleDict({name: nn.Linear(WIDTH, count) for name, count in counts.items()})
    modules = nn.ModuleList([reader.encoder, probes]).train()
    optimizer = torch.optim.AdamW(modules.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    started, step, log_at, right = time.monotonic(), 0, 0.0, {}
    while (elapsed := time.monotonic() - started) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 50) * max(0.01, min(1.0, (1 - elapsed / seconds) / 0.6))
        edits = draw_edits(batch, rng)
        wanted = _what_to_know(edits)
        features = reader(draw_pixels(edits, list(caches.values())[step % len(caches)])[0], edits.instructions)
        loss = 0.0
        for name, probe in probes.items():
            tokens = features[:, _PANELS] if name.startswith("panel") else features[:, _SHAPE:]
            if name == "value" or name.startswith("there"):
                tokens = features[:, _VALUE:]
            logits = probe(tokens)
            labels = wanted[name] if wanted[name].ndim == 2 else wanted[name][:, None].expand(tokens.shape[:2])
            loss = loss + nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            share = (logits.argmax(dim=-1) == labels).double().mean().item()
            right[name] = 0.95 * right.get(name, share) + 0.05 * share
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
        optimizer.step()
        step += 1
        if elapsed > log_at:
            shares = " ".join(f"{name} {share:.2f}" for name, share in right.items())
            logger.info("reader %4.0f/%.0f s step %d loss %.3f: %s", elapsed, seconds, step, loss.item(), shares)
            log_at += 20
    reader.encoder.eval()
    return right


def _what_to_know(edits: EditBatch) -> dict[str, torch.Tensor]:
    """Labels of every probe: (B, 4) for panels, (B,) for words."""
    shown = edits.before
    places = np.broadcast_to(np.arange(4), shown.shape).copy()
    panels = {"style": shown // 35, "colour": shown // 5 % 7, "shape": shown % 5, "view": edits.views}
    there = {n: v[np.arange(len(shown)), edits.place] for n, v in panels.items()}
    words = {"asked shape": there["shape"], "place": edits.place, "value": edits.value}
    known = (
        {f"panel {n}": v for n, v in panels.items()}
        | {"panel place": places}
        | {f"there {n}": v for n, v in there.items()}
        | words
    )
    return {name: torch.from_numpy(v) for name, v in known.items()}
