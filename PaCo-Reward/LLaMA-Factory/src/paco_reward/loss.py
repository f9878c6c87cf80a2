"""First-token-weighted loss of the judge (PaCo-RL, arXiv 2512.04784; docs/method.md §3).

Notation: B rows, L positions, V vocabulary, K labeled tokens of a micro-batch, A answers. An
*answer* is a maximal run of labeled tokens in a row: one per row in ordinary batches, several in
packed ones. Its n tokens have cross-entropies l_0 .. l_{n-1}.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Answers:
    """The answers of a micro-batch."""

    mask: Tensor  # (B, L-1) bool, True where position t predicts a labeled token t+1
    tokens: Tensor  # (K,) int64, the labeled tokens, row by row
    answer_index: Tensor  # (K,) int64, which answer each token belongs to, 0 .. A-1
    is_first: Tensor  # (K,) bool, True at the first token of an answer
    lengths: Tensor  # (A,) int64, tokens of each answer


def find_answers(labels: Tensor) -> Answers:
    """The answers in labels (B, L) int64, -100 = ignored. Nothing predicts position 0."""
    mask = labels[:, 1:] != IGNORE_INDEX
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    is_first = starts[mask]
    answer_index = is_first.long().cumsum(0) - 1
    return Answers(
        mask=mask,
        tokens=labels[:, 1:][mask],
        answer_index=answer_index,
        is_first=is_first,
        lengths=torch.bincount(answer_index),
    )


@contextmanager
def answer_positions_only(head: nn.Module, mask: Tensor) -> Iterator[None]:
    """Let the output layer ``head`` compute logits (K, V) of the positions in ``mask`` only.

    An answer has about 100 tokens, its prompt with two images has thousands, and the logits of one
    position take 0.6 MB (152k in float32).
    """

    def keep_answers(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        hidden_states = inputs[0][:, :-1]
        return (hidden_states[mask.to(hidden_states.device)],)

    handle = head.register_forward_pre_hook(keep_answers)
    try:
        yield
    finally:
        handle.remove()


def token_weights(answers: Answers, weight: float, scheme: str = "sequence") -> Tensor:
    """Weight of each labeled token, (K,) float32.

    sequence: ``weight`` for the first token of an answer, (1 - weight)/(n - 1) for each other; 1 if
        n = 1.
    released: ``weight`` for the first, n(1 - weight)/(n - 1) for each other.
    """
    length = answers.lengths[answers.answer_index].to(torch.float32)
    other = (1.0 - weight) / (length - 1).clamp(min=1)
    if scheme == "released":
        return torch.where(answers.is_first, weight, other * length)
    first = torch.where(length == 1, 1.0, weight)
    return torch.where(answers.is_first, first, other)


def first_token_loss_func(
    outputs: Mapping[str, Tensor],
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    weight: float = 0.1,
    scheme: str = "sequence",
) -> Tensor:
    """Loss of one micro-batch, a () float32 tensor.

    LLaMA-Factory's trainer calls it with the first three arguments.

        sequence: sum over answers of (weight * l_0 + (1 - weight) * mean(l_1 .. l_{n-1})), or of
                  l_0 if n = 1, / number of answers
        released: sum over tokens of (their weight * l) / K / number of micro-batches

    Args:
        outputs: ``logits`` (K, V) of the labeled tokens, row by row (``answer_positions_only``).
        labels: (B, L) int64, -100 = ignored; padding on either side.
        num_items_in_batch: The number of answers ("sequence") or of micro-batches ("released") in
            an optimizer step, so that its micro-batches sum to its loss. None: this micro-batch is
            the step.
        weight: Share of the first token, in [0, 1].
        scheme: "sequence", or "released" as in the authors' trainer.

    A micro-batch without answers has loss 0 and gradient 0, so that processes stay in step.
    """
    logits = outputs["logits"]
    answers = find_answers(labels)
    if len(answers.tokens) == 0:
        return logits.sum() * 0.0
    token_losses = functional.cross_entropy(logits.float(), answers.tokens, reduction="none")
    total = (token_losses * token_weights(answers, weight, scheme)).sum()
    if scheme == "released":
        total = total / len(answers.tokens)
        return total if num_items_in_batch is None else total / num_items_in_batch
    num_answers = len(answers.lengths) if num_items_in_batch is None else num_items_in_batch
    return total / num_answers
