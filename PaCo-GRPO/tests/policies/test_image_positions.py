"""Positions of image tokens in Qwen-Image-Edit's text encoder: rows and columns (M-RoPE)."""

import torch
from tiny_policies import items, load

NAME = "qwen_image_edit"


def encoded(policy, item):
    """The arguments of the text encoder and the position ids of the language model for ``item``."""
    seen = {}
    encoder = policy.pipeline.text_encoder
    encoder.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    encoder.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(position_ids=kwargs["position_ids"]),
        with_kwargs=True,
    )
    policy.encode([item])
    return seen


def test_image_tokens_have_their_rows_and_columns(tiny_folder):
    policy = load(NAME, tiny_folder(NAME), negative_prompt=None, guidance_scale=1.0)
    (item,) = items(NAME, "make it blue", size=(32, 96))
    seen = encoded(policy, item)
    encoder = policy.pipeline.text_encoder
    own, _ = encoder.model.get_rope_index(
        seen["input_ids"],
        seen["mm_token_type_ids"],
        seen["image_grid_thw"],
        attention_mask=seen["attention_mask"],
    )
    assert torch.equal(seen["position_ids"], own)
    image = own[
        :, seen["input_ids"] == encoder.config.image_token_id
    ].T.tolist()  # (time, row, column) of each token
    start = image[0][0]
    _, rows, columns = (seen["image_grid_thw"][0] // torch.tensor([1, 2, 2])).tolist()
    assert image == [
        [start, start + row, start + column] for row in range(rows) for column in range(columns)
    ]
