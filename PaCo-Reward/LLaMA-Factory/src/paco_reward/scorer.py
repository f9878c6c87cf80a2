"""The judge in this process, with transformers.

judge = JudgeScorer.from_pretrained("path/to/judge")            # adapter="path/to/lora" for base + adapter
pairs = judge.image_pairs(["a.png", "b.png", "c.png"], theme="one fox in four seasons")
print([verdict.p_yes for verdict in judge.score(pairs)])
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from paco_judge.client import Pair
from paco_judge.grid import pairs as index_pairs
from paco_judge.images import as_received
from paco_judge.questions import DEFAULT_FORM, RequestForm, build_messages, theme_question
from paco_judge.verdict import ANSWER_TOKENS, Verdict, p_yes_from_logits
from paco_judge.weights import from_pretrained_strict
from paco_reward.errors import PacoRewardError
from paco_reward.families import CHAT_OPTIONS, set_limits, trained_limits
from paco_reward.images import open_image
from paco_reward.overlay import option_ids
from paco_reward.preflight import check_adapter, check_model

UNANSWERED = "neither Yes nor No is among the judge's top {} tokens"


class JudgeScorer:
    """Scores pairs with a Qwen2.5-VL, Qwen3-VL or Qwen3.5 judge. A pair's score does not depend on what it is batched with."""

    def __init__(
        self, model: torch.nn.Module, processor: Any, batch_size: int = 16, form: RequestForm = DEFAULT_FORM
    ) -> None:
        """``batch_size``: pairs per forward pass; ``form``: image labels, image format, tokens that count as answers."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        self.model, self.processor, self.batch_size = model.eval(), processor, batch_size
        # With left padding every answer begins at the last position.
        self.processor.tokenizer.padding_side = "left"
        self.yes_id, self.no_id = option_ids(processor.tokenizer)
        self.form = form
        encoded = [
            [processor.tokenizer.encode(word, add_special_tokens=False) for word in words]
            for words in ANSWER_TOKENS[form.answer_tokens]
        ]
        self._answer_ids = [sorted({ids[0] for ids in answer if len(ids) == 1}) for answer in encoded]  # yes, no

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        adapter: str | Path | None = None,
        *,
        device: str | None = None,
        dtype: torch.dtype | None = None,
        batch_size: int = 16,
        form: RequestForm = DEFAULT_FORM,
    ) -> "JudgeScorer":
        """Load a judge.

        Args:
            model: Folder or hub name of a vision-language model.
            adapter: Folder or hub name of a peft adapter for it. Images are limited as in its training.
            device: Default: the first GPU, else the CPU.
            dtype: Default: as stored on a GPU, float32 on a CPU.
            batch_size, form: As in the constructor.

        Raises:
            PacoRewardError: Model or adapter is missing or incomplete, or the model has no chat template.
        """
        from transformers import AutoModelForImageTextToText, AutoProcessor

        check_model(str(model))
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = dtype or ("auto" if device.startswith("cuda") else torch.float32)
        processor = AutoProcessor.from_pretrained(model)
        if not getattr(processor, "chat_template", None):
            raise PacoRewardError(f"model {model} has no chat template; copy chat_template.jinja from its base model")
        try:
            loaded = from_pretrained_strict(AutoModelForImageTextToText, model, dtype=dtype).to(device)
        except ValueError as error:
            raise PacoRewardError(f"{error}; download or export it again") from error
        if adapter is not None:
            loaded = load_adapter(loaded, adapter)
            if limits := trained_limits(adapter):
                set_limits(processor, limits)
        return cls(loaded, processor, batch_size, form)

    def image_pairs(self, images: Sequence[str | Path | Image.Image], theme: str) -> list[Pair]:
        """All unordered pairs of the images (files, URLs, in memory) with the theme question: (0,1), (0,2), …"""
        opened = [open_image(image) for image in images]
        question = theme_question(theme)
        return [Pair(opened[i], opened[j], question) for i, j in index_pairs(len(opened))]

    def score(self, pairs: Sequence[Pair], top: int | None = None) -> list[Verdict]:
        """P(Yes) in [0, 1] or an error for each pair, in order.

        Args:
            pairs: Images and questions.
            top: As a server's ``top_logprobs``: no score if neither Yes nor No is among the ``top`` most probable
                tokens. None: the whole vocabulary counts.
        """
        verdicts: list[Verdict] = []
        for start in range(0, len(pairs), self.batch_size):
            logits = self.first_token_logits(pairs[start : start + self.batch_size])
            finite = np.isfinite(logits[:, [self.yes_id, self.no_id]]).all(1)
            p_yes = p_yes_from_logits(np.nan_to_num(logits), *self._answer_ids, top)
            verdicts += [_verdict(value, good, top) for value, good in zip(p_yes, finite, strict=True)]
        return verdicts

    def prompt(self, question: str) -> str:
        """The prompt of a pair in the chat template: image 1, image 2, question."""
        message = build_messages("", "", question, self.form)[0]
        content = [{"type": "image"} if part["type"] == "image_url" else part for part in message["content"]]
        return self.processor.apply_chat_template(
            [{"role": message["role"], "content": content}], tokenize=False, add_generation_prompt=True, **CHAT_OPTIONS
        )

    def inputs(self, pairs: Sequence[Pair]) -> Any:
        """Model inputs of B pairs, padded on the left: input_ids (B, L), pixel_values, …"""
        images = [as_received(open_image(image), self.form.image_format) for pair in pairs for image in pair.images]
        text = [self.prompt(pair.question) for pair in pairs]
        return self.processor(text=text, images=images, padding=True, return_tensors="pt").to(self.model.device)

    @torch.inference_mode()
    def first_token_logits(self, pairs: Sequence[Pair]) -> np.ndarray:
        """Logits of the first answer token, (B, V) float32."""
        outputs = self.model(**self.inputs(pairs), logits_to_keep=1, use_cache=False)
        return outputs.logits[:, -1].float().cpu().numpy()

    @torch.inference_mode()
    def reasons(self, pairs: Sequence[Pair], max_new_tokens: int = 512) -> list[str]:
        """The whole answer to each pair, greedily decoded: Yes or No, then reasons."""
        answers: list[str] = []
        for start in range(0, len(pairs), self.batch_size):
            inputs = self.inputs(pairs[start : start + self.batch_size])
            made = self.model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
            answers += self.processor.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return [answer.strip() for answer in answers]


def _verdict(p_yes: float, finite: bool, top: int | None) -> Verdict:
    if not finite:
        return Verdict(None, "the model's logits are not finite")
    return Verdict(None, UNANSWERED.format(top)) if np.isnan(p_yes) else Verdict(float(p_yes))


def quiet() -> None:
    """Silence transformers' progress bars and warnings, for command lines."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def load_adapter(model: torch.nn.Module, adapter: str | Path) -> torch.nn.Module:
    """The model with a peft adapter (folder or hub name). Raises PacoRewardError if there is none."""
    from peft import PeftModel

    check_adapter(str(adapter))
    return PeftModel.from_pretrained(model, str(adapter))
