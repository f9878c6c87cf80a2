"""The judge in this process, with transformers: images and a question become P(Yes).

    judge = JudgeScorer.from_pretrained("path/to/judge")            # adapter="path/to/lora" for base + adapter
    verdicts = judge.score([Pair(load_image("a.png"), load_image("b.png"), theme_question("one fox in four seasons"))])

`paco-reward`, the benchmarks and the CPU engine score here. It needs the extra ``scorer`` (torch, transformers, peft).
Shapes: B chats, L tokens, V vocabulary.
"""

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from paco_judge.images import as_received
from paco_judge.questions import CHAT_OPTIONS, DEFAULT_FORM, Pair, RequestForm, build_messages
from paco_judge.verdict import ANSWER_TOKENS, Verdict, p_yes_from_logits
from paco_judge.weights import WrongWeights, from_pretrained_strict

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
EDGES = ("shortest_edge", "longest_edge")  # pixels, in spite of their names
# Adapters that were trained with transformers before 4.52 name the layers as the published folders do.
_NEW_NAMES = {
    "^visual": "model.visual",
    r"^model(?!\.(language_model|visual))": "model.language_model",
}


@dataclass(frozen=True)
class Chat:
    """Messages, whose content parts are texts or ``{"type": "image"}``, and the images in order."""

    messages: Sequence[dict]
    images: Sequence[Image.Image]


class JudgeScorer:
    """A Qwen2.5-VL, Qwen3-VL or Qwen3.5 judge. ``batch_size``: pairs per forward pass."""

    def __init__(
        self,
        model: torch.nn.Module,
        processor: Any,
        batch_size: int = 16,
        form: RequestForm = DEFAULT_FORM,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.model, self.processor, self.batch_size, self.form = (
            model.eval(),
            processor,
            batch_size,
            form,
        )
        # With left padding every answer begins at the last position.
        self.processor.tokenizer.padding_side = "left"
        self.yes_id, self.no_id = option_ids(processor.tokenizer)
        encode = lambda word: processor.tokenizer.encode(word, add_special_tokens=False)
        self._answer_ids = [
            sorted({encode(word)[0] for word in words if len(encode(word)) == 1})
            for words in ANSWER_TOKENS[form.answer_tokens]
        ]

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        adapter: str | Path | None = None,
        *,
        dtype: torch.dtype | None = None,
        batch_size: int = 16,
        form: RequestForm = DEFAULT_FORM,
    ) -> "JudgeScorer":
        """Load a judge on the first GPU, or on the CPU. Raises OSError, ValueError, WrongWeights.

        Args:
            model, adapter: Folder or hub name. Images are limited as in the adapter's training.
            dtype: Default: as stored on a GPU, float32 on a CPU.
        """
        from transformers import AutoModelForImageTextToText, AutoProcessor

        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = dtype or ("auto" if device == "cuda" else torch.float32)
        processor = AutoProcessor.from_pretrained(model)
        if not getattr(processor, "chat_template", None):
            raise ValueError(
                f"model {model} has no chat template; copy chat_template.jinja from its base model"
            )
        loaded = from_pretrained_strict(AutoModelForImageTextToText, model, dtype=dtype).to(device)
        if adapter is not None:
            loaded = load_adapter(loaded, adapter)
            if limits := trained_limits(adapter):
                set_limits(processor, limits)
        see_images_once(loaded)
        return cls(loaded, processor, batch_size, form)

    def score(self, pairs: Sequence[Pair], top: int | None = None) -> list[Verdict]:
        """A verdict for each pair, in order; it does not depend on the pair's batch.

        ``top``: only so many of the most probable tokens count, as with a server's ``top_logprobs``; None: all.
        """
        verdicts: dict[int, Verdict] = {}
        for start in range(0, len(pairs), self.batch_size):
            chats = {}
            for index in range(start, min(start + self.batch_size, len(pairs))):
                try:
                    chats[index] = self.chat(pairs[index])  # a sequence may open its images here
                except ValueError as error:  # text or images that the model cannot take
                    verdicts[index] = Verdict(None, str(error))
            if chats:
                logits = self.first_token_logits(list(chats.values()))
                for index, row, p_yes in zip(
                    chats, logits, p_yes_from_logits(logits, *self._answer_ids, top), strict=True
                ):
                    if not np.isfinite(row[[self.yes_id, self.no_id]]).all():
                        verdicts[index] = Verdict(None, "the model's logits are not finite")
                    elif np.isnan(p_yes):
                        verdicts[index] = Verdict(
                            None, f"neither Yes nor No is among the judge's top {top} tokens"
                        )
                    else:
                        verdicts[index] = Verdict(float(p_yes))
        return [verdicts[index] for index in range(len(pairs))]

    def reasons(self, pairs: Sequence[Pair], max_new_tokens: int = 512) -> list[str]:
        """The whole greedy answer to each pair. Raises ValueError: The model cannot take a text or an image."""
        chats, answers = [self.chat(pair) for pair in pairs], []
        for start in range(0, len(chats), self.batch_size):
            ids = self.generate(chats[start : start + self.batch_size], max_new_tokens)
            answers += self.processor.batch_decode(ids, skip_special_tokens=True)
        return [answer.strip() for answer in answers]

    def chat(self, pair: Pair) -> Chat:
        """A pair as the judge is shown it. Raises ValueError."""
        message = build_messages([""] * len(pair.images), pair.question, self.form)[0]
        content = [
            {"type": "image"} if part["type"] == "image_url" else part
            for part in message["content"]
        ]
        chat = Chat(
            [message | {"content": content}],
            [as_received(i, self.form.image_format) for i in pair.images],
        )
        self.check(chat)
        return chat

    def check(self, chat: Chat) -> int:
        """The number of a chat's image tokens; no image is decoded. Raises ValueError."""
        reserved = [getattr(self.processor, f"{kind}_token", None) for kind in ("image", "video")]
        for text in (
            part["text"]
            for message in chat.messages
            for part in message["content"]
            if "text" in part
        ):
            if held := [token for token in reserved if token and token in text]:
                raise ValueError(
                    f"a text holds {held[0]}, which stands for an image in this model; remove it"
                )
        images = self.processor.image_processor
        patches = [
            images.get_number_of_image_patches(image.height, image.width, {})
            for image in chat.images
        ]
        return sum(patches) // images.merge_size**2

    def length(self, chat: Chat) -> int:
        """The number of tokens of a chat's prompt. Raises ValueError."""
        images = self.check(chat)
        return (
            len(self.processor.tokenizer(self.prompt(chat.messages))["input_ids"])
            + images
            - len(chat.images)
        )

    def prompt(self, messages: Sequence[dict]) -> str:
        """The messages as the model's chat template renders them."""
        options = {
            "chat_template": self.processor.chat_template,
            "tokenize": False,
            "add_generation_prompt": True,
        }
        return self.processor.tokenizer.apply_chat_template(messages, **options, **CHAT_OPTIONS)

    def inputs(self, chats: Sequence[Chat]) -> Any:
        """Model inputs, padded on the left: input_ids (B, L), pixel_values, …"""
        text = [self.prompt(chat.messages) for chat in chats]
        images = [image for chat in chats for image in chat.images]
        return self.processor(
            text=text, images=images or None, padding=True, return_tensors="pt"
        ).to(self.model.device)

    @torch.inference_mode()
    def first_token_logits(self, chats: Sequence[Chat]) -> np.ndarray:
        """Logits of the first answer token, (B, V) float32."""
        outputs = self.model(**self.inputs(chats), logits_to_keep=1, use_cache=False)
        return outputs.logits[:, -1].float().cpu().numpy()

    @torch.inference_mode()
    def generate(self, chats: Sequence[Chat], max_new_tokens: int) -> torch.Tensor:
        """Greedy answers: token ids, (B, at most ``max_new_tokens``)."""
        inputs = self.inputs(chats)
        ids = self.model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        return ids[:, inputs["input_ids"].shape[1] :]


def option_ids(tokenizer: Any) -> tuple[int, int]:
    """Token ids of Yes and No. Raises ValueError."""
    yes, no = (tokenizer.encode(option, add_special_tokens=False) for option in ("Yes", "No"))
    if len(yes) != 1 or len(no) != 1:
        raise ValueError(f"the tokenizer splits Yes or No into several tokens ({yes}, {no})")
    return yes[0], no[0]


def see_images_once(model: torch.nn.Module) -> None:
    """Let equal images of a batch pass the model's vision tower once: no image attends to another."""
    (visual,) = (
        module for name, module in model.named_modules() if name.rpartition(".")[2] == "visual"
    )
    forward = visual.forward

    def once(patches: torch.Tensor, grid_thw: torch.Tensor, **options: Any) -> Any:
        parts = patches.split(grid_thw.prod(-1).tolist())
        contents = [
            (*grid, part.float().cpu().numpy().tobytes())
            for grid, part in zip(grid_thw.tolist(), parts)
        ]
        places = {
            content: contents.index(content) for content in contents
        }  # the first of each, in order
        kept, order = list(places.values()), [list(places).index(content) for content in contents]
        seen = forward(
            torch.cat([parts[place] for place in kept]), grid_thw=grid_thw[kept], **options
        )
        sizes = [len(parts[place]) for place in kept]

        def for_all(features: torch.Tensor) -> torch.Tensor:
            """(tokens of the images seen, D) to those of all; a token is one patch or several."""
            of_each = features.split([size * len(features) // sum(sizes) for size in sizes])
            return torch.cat([of_each[place] for place in order])

        for name, value in seen.items():
            seen[name] = (
                for_all(value)
                if isinstance(value, torch.Tensor)
                else [for_all(each) for each in value]
            )
        return seen

    visual.forward = once


def silence_transformers() -> None:
    """Turn off transformers' progress bars and warnings."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def load_adapter(model: torch.nn.Module, adapter: str | Path) -> torch.nn.Module:
    """The model with a peft adapter. Raises OSError, WrongWeights: The adapter does not fit the model."""
    from peft import PeftModel, get_peft_model_state_dict
    from peft.utils import load_peft_weights
    from safetensors import SafetensorError

    folder = local_folder(adapter, ("adapter_*",))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")
            loaded = PeftModel.from_pretrained(model, str(folder), key_mapping=_NEW_NAMES)
    except (RuntimeError, UserWarning, SafetensorError) as error:
        raise WrongWeights(f"the adapter in {folder} does not fit its base: {error}") from error
    unused = len(load_peft_weights(str(folder))) - len(
        get_peft_model_state_dict(loaded, save_embedding_layers=False)
    )
    if unused:
        raise WrongWeights(
            f"the adapter in {folder} has {unused} tensors for layers that its base lacks"
        )
    return loaded


def local_folder(name: str | Path, patterns: Sequence[str]) -> Path:
    """A local folder, or the folder of a hub model's matching files, downloaded if necessary."""
    if (folder := Path(name).expanduser()).is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(name), allow_patterns=list(patterns)))


def trained_limits(adapter: str | Path) -> dict[str, int] | None:
    """Fewest and most pixels of an image in an adapter's training; None if its folder does not say."""
    folder = local_folder(adapter, PROCESSOR_FILES)
    for file in filter(Path.is_file, (folder / name for name in PROCESSOR_FILES)):
        settings = json.loads(file.read_bytes())
        size = settings.get("image_processor", settings).get("size", {})
        if all(edge in size for edge in EDGES):
            return {edge: size[edge] for edge in EDGES}
    return None


def set_limits(processor: Any, limits: dict[str, int]) -> None:
    """Give the processor the limits of ``trained_limits``."""
    # A new object, because processors without a size of their own share their class's.
    processor.image_processor.size = type(processor.image_processor.size)(**limits)
