"""Positions of image tokens in Qwen-Image-Edit's text encoder: rows and columns (M-RoPE), or the installed pipeline's."""

import re

import numpy as np
import torch
from named import load as load_named
from tiny_policies import items, load

from paco_grpo.checkpoint.model_card import write_model_card

NAME = "qwen_image_edit"


def encoded(policy, item):
    """Features of ``item``, the arguments of its text encoder and the position ids of the language model."""
    seen, encoder = {}, policy.pipeline.text_encoder
    encoder.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    encoder.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(position_ids=kwargs["position_ids"]), with_kwargs=True
    )
    return policy.encode([item]).prompt_embeds, seen


def mrope(ids, grid, image_token):
    """(3, L) by hand: text counts on, an image's tokens have one time, their row and their column (Qwen2-VL, 2409.12191)."""
    rows, columns = grid[1] // 2, grid[2] // 2  # 2x2 patches are a token
    positions, following, image = [], 0, 0
    for token in ids:
        if token == image_token:
            positions.append((following, following + image // columns, following + image % columns))
            image += 1
            if image == rows * columns:
                following += max(rows, columns)
        else:
            positions.append((following,) * 3)
            following += 1
    return np.array(positions).T


def test_image_tokens_have_their_rows_and_columns(tiny_folder):
    policy = load(NAME, tiny_folder(NAME), negative_prompt=None, guidance_scale=1.0)
    (item,) = items(NAME, "make it blue", size=(32, 96))
    features, seen = encoded(policy, item)
    encoder = policy.pipeline.text_encoder
    expected = mrope(seen["input_ids"][0].tolist(), seen["image_grid_thw"][0].tolist(), encoder.config.image_token_id)
    assert np.array_equal(seen["position_ids"][:, 0].numpy(), expected)
    assert len({tuple(column) for column in expected.T}) == expected.shape[1] and (expected[1] != expected[2]).any()
    own, _ = encoder.model.get_rope_index(
        seen["input_ids"], seen["mm_token_type_ids"], seen["image_grid_thw"], attention_mask=seen["attention_mask"]
    )
    assert torch.equal(seen["position_ids"], own)

    stock = load(NAME, tiny_folder(NAME), negative_prompt=None, guidance_scale=1.0, image_positions="stock")
    without, seen = encoded(stock, item)
    assert seen["position_ids"] is None and "mm_token_type_ids" not in seen  # one position a token
    assert features.shape == without.shape and (features - without).abs().max() > 1e-3


def test_the_model_card_says_how_to_get_them_in_diffusers(tiny_folder, tmp_path):
    for positions in ("mrope", "stock"):
        policy = load(NAME, tiny_folder(NAME), image_positions=positions)
        write_model_card(tmp_path, load_named("qwen_editing"), policy, epochs=1)
        (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "README.md").read_text(), re.DOTALL)
        assert ("mm_token_type_ids" in code) == (positions == "mrope")
        assert code.strip().endswith(policy.pipeline_setup)  # which test_families.py runs
        compile(code, "README.md", "exec")
