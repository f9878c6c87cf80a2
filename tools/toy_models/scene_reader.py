"""The toy Qwen-Image-Edit's text encoder: a small Qwen2.5-VL that reads a scene and an instruction.

QwenImageEditPipeline wraps every instruction in a fixed text and drops the features of the first 64 tokens. This tokenizer
has one token for every word of that text and of the instructions, so these 64 tokens end before the image, as with Qwen's
tokenizer. A scene is four image tokens, one per panel.
"""

from __future__ import annotations

import numpy as np
import torch
from diffusers import QwenImageEditPipeline
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer, Qwen2VLProcessor

from paco_toy.world import SHAPES
from toy_models.edit_data import INSTRUCTIONS, VALUES, render_edits, sample_edits
from toy_models.panels import FACTS, PanelCache, panel_facts
from toy_models.qwen_vl import SPECIAL_TOKENS, new_image_processors, new_model, new_tokenizer
from toy_models.training import fit

WIDTH = 96
NO_INSTRUCTION = " "  # for the unconditional half of true CFG
# Features that the pipeline keeps: vision start, four panels, vision end, "make", "the", shape, value, end of the message.
_PANELS, _SHAPE, _VALUE = slice(1, 5), 8, 9


def prompt_template() -> tuple[str, int]:
    """The pipeline's text around an instruction, and how many of its tokens the pipeline drops."""
    pipeline = QwenImageEditPipeline(None, None, None, None, None, None)
    return pipeline.prompt_template_encode, pipeline.prompt_template_encode_start_idx


def new_editor_processor() -> Qwen2VLProcessor:
    """A vocabulary with one token per word, and 56 x 56 px images."""
    plain = prompt_template()[0].format("")
    for special in SPECIAL_TOKENS:
        plain = plain.replace(special, "\0")
    # 4096 is no limit here: merging ends when every word is one token.
    tokenizer = new_tokenizer([*plain.split("\0"), *INSTRUCTIONS, NO_INSTRUCTION], 4096, min_frequency=1)
    images, videos = new_image_processors()
    return Qwen2VLProcessor(images, tokenizer, videos, chat_template="")


def new_text_encoder(tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """An untrained Qwen2.5-VL of 0.4 M parameters."""
    text = {
        "hidden_size": WIDTH, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 3,
        "num_key_value_heads": 1,
    }  # fmt: skip
    return new_model(tokenizer, seed, text, {"depth": 2, "hidden_size": 48, "intermediate_size": 96})


class SceneReader:
    """Features of (scene, instruction) as QwenImageEditPipeline computes them, for batches of instructions of one length."""

    def __init__(self, encoder: Qwen2_5_VLForConditionalGeneration, processor: Qwen2VLProcessor):
        self.encoder, self.processor = encoder, processor
        self.template, self.dropped = prompt_template()

    def __call__(self, pixels: np.ndarray, instructions: list[str]) -> torch.Tensor:
        """Features (B, L, D) for uint8 scenes (B, S, S, 3)."""
        scenes = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        images = self.processor.image_processor(images=scenes, return_tensors="pt")
        texts = [self.template.format(text).replace("<|image_pad|>", "<|image_pad|>" * 4) for text in instructions]
        ids = self.processor.tokenizer(texts, return_tensors="pt").input_ids
        # Only what the pipeline passes on: without mm_token_type_ids every token has one position, image tokens too.
        hidden = self.encoder.model(input_ids=ids, attention_mask=torch.ones_like(ids), **images, use_cache=False)
        return hidden.last_hidden_state[:, self.dropped :]


def pretrain_reader(
    reader: SceneReader, caches: dict[int, PanelCache], seconds: float, seed: int, batch: int = 32
) -> None:
    """Teaches the encoder to read scenes and instructions before anything is drawn, as Qwen2.5-VL can.

    Each panel's token encodes what the panel shows. The shape's token encodes the shape and which panel shows it; the value's
    token also the value and what that panel shows. Linear probes are trained with the encoder and discarded.

    Args:
        caches: Panel side in pixels -> panels.
    """
    torch.manual_seed(seed + 7)
    rng = np.random.default_rng([seed, 4])
    counts = {f"panel {n}": c for n, c in FACTS.items()} | {f"there {n}": c for n, c in FACTS.items()}
    counts |= {"panel place": 4, "asked shape": len(SHAPES), "place": 4, "value": len(VALUES)}
    probes = nn.ModuleDict({name: nn.Linear(WIDTH, count) for name, count in counts.items()})

    def next_loss(step: int, progress: float) -> tuple[torch.Tensor, dict]:
        edits = sample_edits(batch, rng)
        facts = panel_facts(edits.before, edits.views)
        there = {n: v[np.arange(batch), edits.place, None] for n, v in facts.items()}
        facts["place"] = np.tile(np.arange(4), (batch, 1))
        wanted = {f"panel {n}": v for n, v in facts.items()} | {f"there {n}": v for n, v in there.items()}
        wanted |= {"asked shape": there["shape"], "place": edits.place[:, None], "value": edits.value[:, None]}
        features = reader(render_edits(edits, list(caches.values())[step % len(caches)])[0], edits.instructions)
        loss, right = 0.0, {}
        for name, probe in probes.items():
            after_value = name == "value" or name.startswith("there")
            where = _PANELS if name.startswith("panel") else slice(_VALUE if after_value else _SHAPE, None)
            tokens = features[:, where]
            logits, labels = probe(tokens), torch.from_numpy(wanted[name]).expand(tokens.shape[:2])
            loss = loss + cross_entropy(logits.flatten(0, 1), labels.flatten())
            right[name] = (logits.argmax(dim=-1) == labels).double().mean()
        return loss, {"loss": loss, **right}

    fit([(nn.ModuleList([reader.encoder, probes]), 2e-3)], next_loss, "reader", seconds=seconds, decay=0.6)
