"""Z-Image and Z-Image-Turbo: a Qwen3 text encoder, one sequence of text and image, true CFG."""

from collections.abc import Sequence

import torch
from diffusers import ZImagePipeline
from torch import nn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from paco_grpo.policies.diffusers_policy import FlatLatents, ForwardInputs
from paco_grpo.policies.true_cfg import ScaleFromZero


class ZImagePolicy(FlatLatents, ScaleFromZero):
    """Z-Image, Z-Image-Turbo and everything saved as a ``ZImagePipeline``."""

    pipeline_class = ZImagePipeline
    family = "Z-Image"
    lora_targets = (
        "attention.to_q",
        "attention.to_k",
        "attention.to_v",
        "attention.to_out.0",
        "feed_forward.w1",
        "feed_forward.w2",
        "feed_forward.w3",
    )

    @classmethod
    @override
    def in_template(cls, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
        """With the start of an answer."""
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=True,
        )

    @override
    def text_encoders(self) -> Sequence[nn.Module]:
        """Qwen3."""
        return (self.pipeline.text_encoder,)

    @override
    def _encode_text(self, text: str, length: int) -> tuple[torch.Tensor]:
        """Without padding; the pipeline writes into the list that it gets."""
        (embeds,), _ = self.pipeline.encode_prompt(
            [text],
            device=self._encoder_device,
            do_classifier_free_guidance=False,
            max_sequence_length=length,
        )
        return (embeds,)

    @override
    def _forward(self, inputs: ForwardInputs) -> torch.Tensor:
        embeds, mask, _ = inputs.text
        lengths = [embeds.shape[1]] * len(embeds) if mask is None else mask.sum(dim=1).tolist()
        texts = [row[:length] for row, length in zip(embeds, lengths, strict=True)]
        latents = self._unpack(inputs.latents, inputs.height, inputs.width).to(self.dtype)
        clean = self.transformer(
            list(latents.unsqueeze(2).unbind()),  # videos of one frame
            1 - inputs.sigma,  # its time is 1 at the image; the transformer multiplies by 1000
            texts,
            return_dict=False,
        )[0]
        return -self._pack(torch.stack(clean)[:, :, 0])  # it predicts x_0 − noise
