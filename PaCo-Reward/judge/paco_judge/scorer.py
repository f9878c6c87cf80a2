"""The judge in this process, with transformers: images and a question become P(Yes).

    judge = JudgeScorer.from_pretrained("path/to/base", adapter="path/to/lora")
    question = theme_question("one fox in four seasons")
    verdicts = judge.score([Pair(load_image("a.png"), load_image("b.png"), question)])

`paco-reward` and the benchmarks score here, and vllm_server's engine without vLLM generates here.
It needs the extra ``scorer`` (torch, transformers, peft). Shapes: B chats, L tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from paco_judge.images import as_received
from paco_judge.questions import CHAT_OPTIONS, DEFAULT_FORM, Pair, RequestForm, build_messages
from paco_judge.verdict import (
    ANSWER_TOKENS,
    TOP_LOGPROBS,
    Answer,
    Verdict,
    entry,
    log_softmax,
    top_logprobs,
    verdict_from_top_logprobs,
)
from paco_judge.weights import (
    allowed_pixels,
    explain_missing,
    from_pretrained_strict,
    image_limits,
    load_adapter,
    lower_limits,
    set_limits,
)


@dataclass(frozen=True)
class Chat:
    """Messages, whose content parts are texts or ``{"type": "image"}``, and the images in order."""

    messages: Sequence[dict]
    images: Sequence[Image.Image]


class JudgeScorer:
    """A judge in this process. ``batch_size``: pairs per forward pass.

    Any vision-language model of transformers whose processor takes chats with images can be asked.
    Tested are Qwen2.5-VL, Qwen3-VL, Qwen3.5, Idefics3 and LLaVA.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        processor: Any,
        batch_size: int = 16,
        form: RequestForm = DEFAULT_FORM,
    ) -> None:
        self.model = model.eval()
        self.processor = processor
        self.batch_size = batch_size
        self.form = form
        # With left padding every answer begins at the last position.
        processor.tokenizer.padding_side = "left"
        self.yes_ids, self.no_ids = answer_ids(processor.tokenizer, form.answer_tokens)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        adapter: str | Path | None = None,
        *,
        batch_size: int = 16,
        form: RequestForm = DEFAULT_FORM,
        max_pixels: int | None = None,
        quantize: Literal["nf4"] | None = None,
    ) -> "JudgeScorer":
        """Load a judge on the first GPU, as it is stored, or on the CPU in float32.

        Args:
            model, adapter: Folder or hub name. Images are limited as in the adapter's training.
            max_pixels: Larger images are shrunk to it, unless the limit of model or adapter is
                lower; 0: only to theirs; None: ``allowed_pixels``, as at a server.
            quantize: ``nf4``: all linear layers but the last in 4 bits (QLoRA, arXiv 2305.14314),
                which changes the scores. Needs bitsandbytes.

        Raises:
            UserError: The model or the adapter is missing, incomplete or does not fit.
            ValueError: It is no judge: without a chat template, or without tokens for Yes and No.
            OSError, SafetensorError: Its folder lacks a file, or one is damaged.
        """
        from transformers import AutoModelForImageTextToText, AutoProcessor, BitsAndBytesConfig

        # cuDNN's attention, PyTorch's choice on H100 and newer, can be wrong for models with few
        # key and value heads (pytorch#193893).
        torch.backends.cuda.enable_cudnn_sdp(False)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = "auto" if device == "cuda" else torch.float32
        with explain_missing(model):
            processor = AutoProcessor.from_pretrained(model)
        if not getattr(processor, "chat_template", None):
            raise ValueError(
                f"model {model} has no chat template; copy chat_template.jinja from its base model"
            )
        options: dict[str, Any] = {"dtype": dtype, "device_map": {"": device}}
        if quantize:
            compute = torch.float32 if device == "cpu" else torch.bfloat16
            options["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=compute,
            )
        loaded = from_pretrained_strict(AutoModelForImageTextToText, model, **options)
        for layer in loaded.modules():
            # bitsandbytes' form for the CPU takes only widths that are multiples of 64.
            if hasattr(layer, "support_avx512bf16_for_cpu"):
                layer.support_avx512bf16_for_cpu = False
        if adapter is not None:
            loaded = load_adapter(loaded, adapter)
            if limits := image_limits(adapter):
                set_limits(processor, limits)
        lower_limits(processor, allowed_pixels() if max_pixels is None else max_pixels)
        return cls(loaded, processor, batch_size, form)

    def score(self, pairs: Sequence[Pair], top: int | None = TOP_LOGPROBS) -> list[Verdict]:
        """A verdict for each pair, in order; it does not depend on the pair's batch.

        ``top``: how many of the most probable tokens count. A server's ``top_logprobs`` are as
        many, so that all judges have a score of the same pairs. None: Yes and No, however improbable.
        """

        def verdicts(chats: Sequence[Chat]) -> list[Verdict]:
            return self._verdicts(self.first_token_logits(chats), top)

        return self._in_batches(pairs, verdicts, Verdict)

    def reasons(self, pairs: Sequence[Pair], max_new_tokens: int = 512) -> list[Answer]:
        """The whole greedy answer to each pair, in order."""

        def answers(chats: Sequence[Chat]) -> list[Answer]:
            ids, _ = self.generate(chats, max_new_tokens)
            answers = []
            for text in self.processor.batch_decode(ids, skip_special_tokens=True):
                answers.append(Answer(text.strip()))
            return answers

        return self._in_batches(pairs, answers, Answer)

    def _in_batches(
        self, pairs: Sequence[Pair], ask: Callable[[Sequence[Chat]], list], kind: type
    ) -> list:
        """``ask`` about ``batch_size`` pairs at a time; ``kind(None, why)`` for a pair without chat.

        A sequence may open its images when it is indexed.
        """
        results = {}
        for start in range(0, len(pairs), self.batch_size):
            chats = {}
            for index in range(start, min(start + self.batch_size, len(pairs))):
                try:
                    chats[index] = self.chat(pairs[index])
                except ValueError as error:  # text or images that the model cannot take
                    results[index] = kind(None, str(error))
            if chats:
                results |= zip(chats, ask(list(chats.values())), strict=True)
        return [results[index] for index in range(len(pairs))]

    def _verdicts(self, logits: np.ndarray, top: int | None) -> list[Verdict]:
        """A verdict for each row of ``first_token_logits``."""
        verdicts = []
        for row in logits:
            logprobs = log_softmax(row)
            if top is None:
                ids = [*self.yes_ids, *self.no_ids]
                listed = [entry(self.token(number), logprobs[number]) for number in ids]
            else:
                listed = top_logprobs(logprobs, self.token, top)
            verdicts.append(verdict_from_top_logprobs(listed, self.form.answer_tokens, len(listed)))
        return verdicts

    def token(self, number: int) -> str:
        """The text of a token id, as servers write it."""
        return self.processor.tokenizer.decode([number])

    def chat(self, pair: Pair) -> Chat:
        """A pair as the judge is shown it. Raises ValueError."""
        (message,) = build_messages([""] * len(pair.images), pair.question, self.form)
        for part in message["content"]:
            if part.pop("image_url", None):
                part["type"] = "image"
        images = [as_received(image, self.form.image_format) for image in pair.images]
        chat = Chat([message], images)
        self.check(chat)
        return chat

    def check(self, chat: Chat, max_new_tokens: int = 1) -> None:
        """Look at texts and sizes of images, which are not decoded.

        Raises ValueError: The model cannot take one, or has no places for the text and an answer.
        """
        for kind in ("image_token", "video_token"):
            token = getattr(self.processor, kind, None)
            for message in chat.messages:
                for part in message["content"]:
                    if token and token in part.get("text", ""):
                        raise ValueError(
                            f"a text holds {token}, which stands for an image in this model; "
                            "remove it"
                        )
        images = self.processor.image_processor
        # Qwen's processors know an image's tokens by its size, and refuse some.
        if hasattr(images, "merge_size"):
            for image in chat.images:
                images.get_number_of_image_patches(image.height, image.width, {})
        text = self.prompt(chat.messages)
        text.encode()  # half a surrogate pair is a ValueError
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        length = len(self.processor.tokenizer.encode(text, add_special_tokens=False))
        if longest is not None and length + max_new_tokens > longest:
            raise ValueError(
                f"the text has {length} tokens and the answer may have {max_new_tokens}, together "
                f"more than the {longest} of the model"
            )

    def prompt(self, messages: Sequence[dict]) -> str:
        """The messages as the model's chat template renders them."""
        return self.processor.tokenizer.apply_chat_template(
            messages,
            chat_template=self.processor.chat_template,
            tokenize=False,
            add_generation_prompt=True,
            **CHAT_OPTIONS,
        )

    def inputs(self, chats: Sequence[Chat]) -> Any:
        """Model inputs, padded on the left: input_ids (B, L), pixel_values, …"""
        texts = []
        images = []
        for chat in chats:
            texts.append(self.prompt(chat.messages))
            images.append(list(chat.images))
        if not any(images):
            images = None
        inputs = self.processor(text=texts, images=images, padding=True, return_tensors="pt")
        return inputs.to(self.model.device)

    @torch.inference_mode()
    def first_token_logits(self, chats: Sequence[Chat]) -> np.ndarray:
        """Logits of the first answer token, (B, V) float32."""
        outputs = self.model(**self.inputs(chats), logits_to_keep=1, use_cache=False)
        return outputs.logits[:, -1].float().cpu().numpy()

    @torch.inference_mode()
    def generate(
        self, chats: Sequence[Chat], max_new_tokens: int
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Greedy answers: token ids, (B, at most ``max_new_tokens``), and logits of the first one.

        The logits are those of ``first_token_logits``.
        """
        inputs = self.inputs(chats)
        outputs = self.model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            # As served by vLLM: a model's own sampling defaults do not count.
            repetition_penalty=1.0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        ids = outputs.sequences[:, inputs["input_ids"].shape[1] :]
        return ids, outputs.logits[0].float().cpu().numpy()


def answer_ids(tokenizer: Any, answer_tokens: str = "exact") -> tuple[list[int], list[int]]:
    """Token ids that count as Yes and as No: of the words that are one token each.

    Raises ValueError.
    """
    ids = []
    for words in ANSWER_TOKENS[answer_tokens]:
        single = set()
        for word in words:
            tokens = tokenizer.encode(word, add_special_tokens=False)
            if len(tokens) == 1:
                single.update(tokens)
        if not single:
            raise ValueError("the tokenizer splits Yes or No into several tokens")
        ids.append(sorted(single))
    return tuple(ids)
