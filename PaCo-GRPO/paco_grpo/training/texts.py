"""How many text tokens the prompts of a run need, known before weights are loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from paco_grpo.policies import PolicyLoadError, policy_class
from paco_grpo.training.configuration import ConfigError
from paco_grpo.types import Item

logger = logging.getLogger(__name__)

_MULTIPLE = 64  # tokens: what attention kernels and matrix products divide well


def settle_text_length(config: ConfigDict, items: Iterable[Item]) -> None:
    """Check ``config.max_sequence_length`` against the model and the prompts, and replace 0 by what they need.

    Prompts that will be cut are counted in a warning: two that differ in what is cut are one prompt to the generator.

    Raises:
        ConfigError: It is more than the model takes.
        PolicyLoadError: There is no such model, or it has no tokenizer.
    """
    found = policy_class(config.pretrained.model)
    asked = config.max_sequence_length
    if asked > found.text_limit:
        raise ConfigError(
            f"config.max_sequence_length={asked} is more than {config.pretrained.model} takes: at most {found.text_limit}, "
            "or 0 for the longest prompt of the data set"
        )
    prompts = sorted({item.prompt for item in items})
    lengths = count_tokens(config.pretrained.model, found.tokenizer_folder, prompts)
    longest = max(lengths, default=1)
    if asked == 0:
        config.max_sequence_length = min(found.text_limit, -(-longest // _MULTIPLE) * _MULTIPLE)
        logger.info(
            "max_sequence_length: %d text tokens for prompts of at most %d tokens (the model takes %d)",
            config.max_sequence_length, longest, found.text_limit,
        )  # fmt: skip
    cut = sum(length > config.max_sequence_length for length in lengths)
    if cut:
        logger.warning(
            "%d of %d prompts are longer than config.max_sequence_length=%d tokens and will be cut (the longest has %d)",
            cut, len(lengths), config.max_sequence_length, longest,
        )  # fmt: skip


def count_tokens(model: str, tokenizer_folder: str, texts: Sequence[str]) -> list[int]:
    """Tokens of each of ``texts``, special ones included, by the tokenizer in ``tokenizer_folder`` of a pipeline.

    Raises:
        PolicyLoadError: It cannot be had.
    """
    from transformers import AutoTokenizer

    folder = Path(model).expanduser()
    try:
        # A local folder by its own path: as "subfolder" of a path, some tokenizers are looked for on the hub.
        tokenizer = (
            AutoTokenizer.from_pretrained(folder / tokenizer_folder)
            if folder.is_dir()
            else AutoTokenizer.from_pretrained(model, subfolder=tokenizer_folder)
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise PolicyLoadError(
            f"cannot load the tokenizer in {model}/{tokenizer_folder} ({type(error).__name__}: {str(error)[:300]}). "
            "The folder may be incomplete: download or build it again."
        ) from error
    return [len(tokens) for tokens in tokenizer(list(texts)).input_ids] if texts else []
