"""imagereward on a tiny BLIP of the same architecture: a batch scores as its images one by one."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import BatchEncoding, BertConfig, BertModel

from paco_grpo.rewards.imagereward import ImageRewardScore
from paco_grpo.types import Item

PROMPTS = ["a cat", "a dog on a mat", "a cat"]
IMAGES = [Image.fromarray(np.random.default_rng(i).integers(0, 255, (20, 30, 3), dtype=np.uint8)) for i in range(3)]


def tokenizer(prompts, padding, truncation, max_length, return_tensors):
    assert (padding, truncation, max_length, return_tensors) == ("max_length", True, 35, "pt")
    ids = torch.zeros(len(prompts), max_length, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        words = [1 + sum(map(ord, word)) % 30 for word in prompt.split()]
        ids[row, : len(words)] = torch.tensor(words)
    return BatchEncoding({"input_ids": ids, "attention_mask": (ids > 0).long()})


@pytest.fixture(scope="module")
def model():
    import timm

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    bert = BertModel(BertConfig(**sizes, vocab_size=40, is_decoder=True, add_cross_attention=True)).eval()
    vision = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=0
    ).eval()
    return SimpleNamespace(
        device="cpu",
        blip=SimpleNamespace(tokenizer=tokenizer, visual_encoder=vision.forward_features, text_encoder=bert),
        preprocess=lambda image: torch.tensor(np.asarray(image.resize((16, 16)))).permute(2, 0, 1).float() / 255,
        mlp=torch.nn.Linear(16, 1),
        mean=0.167,
        std=1.033,
    )


def one(model, image, prompt) -> float:
    """The package's ``score`` on one image, step by step."""
    with torch.no_grad():
        text = tokenizer([prompt], "max_length", True, 35, "pt")
        shown = model.blip.visual_encoder(model.preprocess(image)[None])
        output = model.blip.text_encoder(
            text.input_ids, attention_mask=text.attention_mask, encoder_hidden_states=shown,
            encoder_attention_mask=torch.ones(shown.size()[:-1], dtype=torch.long), return_dict=True,
        )  # fmt: skip
        reward = model.mlp(output.last_hidden_state[:, 0, :].float())
    return (reward.item() - model.mean) / model.std


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_a_batch_scores_as_one_by_one(model, batch_size):
    loaded = []
    reward = ImageRewardScore(lambda: loaded.append(1) or model, batch_size)
    items = [Item(i, prompt) for i, prompt in enumerate(PROMPTS)]
    assert not loaded
    for _ in range(2):
        scores = reward(IMAGES, items)
        assert scores == pytest.approx([one(model, *pair) for pair in zip(IMAGES, PROMPTS, strict=True)], abs=1e-5)
    assert len(loaded) == 1
