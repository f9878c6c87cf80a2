"""Tokenizers made in place, since real ones would have to be downloaded: as many tokens as real ones, no meaning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

_SPECIAL = ("<pad>", "</s>", "<unk>", "<s>")
# Pieces of at most eight letters: about 1.5 a word (its punctuation included), near what CLIP and T5 take in English.
_PIECES = Regex(r"\w{1,8}|[^\w\s]")
QWEN_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
PROMPTS = Path(__file__).resolve().parents[2] / "dataset" / "T2IS" / "train_metadata.jsonl"


@cache
def t2is_prompts() -> tuple[str, ...]:
    """The repository's own training prompts."""
    return tuple(json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines())


@cache
def piece_tokenizer(template: str, model_max_length: int, vocab_size: int) -> PreTrainedTokenizerFast:
    """For CLIP (``<s> $A </s>``) and T5 (``$A </s>``): pieces of words that occur in the T2IS prompts."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(_PIECES, behavior="removed", invert=True)
    trainer = trainers.WordLevelTrainer(vocab_size=vocab_size, special_tokens=list(_SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(t2is_prompts(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="<s>", unk_token="<unk>",
        model_max_length=model_max_length,
    )  # fmt: skip


def qwen_tokenizer(texts: Sequence[str]) -> Qwen2Tokenizer:
    """Byte-level BPE in which every word of ``texts`` and of the T2IS prompts becomes one token.

    Qwen's own vocabulary holds nearly every common English word, so lengths are close to the real ones; the fixed
    beginning of the pipeline's template, whose length the pipeline relies on, among them.
    """
    plain = _qwen({token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = plain.backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=50_000, min_frequency=1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*texts, *t2is_prompts()], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return _qwen(model["vocab"], [tuple(pair) for pair in model["merges"]])


def _qwen(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Qwen2Tokenizer:
    shifted = {token: i + len(QWEN_SPECIAL) for token, i in vocabulary.items()}
    return Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(QWEN_SPECIAL)} | shifted,
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(QWEN_SPECIAL),
        model_max_length=131072,
    )
