"""First-token-weighted loss of the judge (PaCo-RL, arXiv 2512.04784; docs/method.md §3).

Notation: B rows, L positions, V vocabulary, K positions that predict a labeled token. An *answer* is a maximal run of
labeled positions in a row: one per row in ordinary batches, several in packed ones. Its n tokens have cross-entropies
l_0 .. l_{n-1}.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

IGNORE_INDEX = -100
SCHEMES = ("sequence", "released")


@dataclass(frozen=True)
class Answers:
    """Where the answers of a batch are."""

    mask: Tensor  # (B, L-1) bool, True where position t predicts a labeled token t+1
    answer: Tensor  # (K,) int64, the answer each of the K labeled tokens belongs to, 0 .. A-1 in row-major order
    first: Tensor  # (K,) bool, True at the first token of an answer
    lengths: Tensor  # (A,) int64, tokens of each answer


def find_answers(labels: Tensor) -> Answers:
    """The answers in labels (B, L) int64, -100 = ignored. Nothing predicts position 0."""
    mask = labels[:, 1:] != IGNORE_INDEX
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    first = starts[mask]
    answer = first.long().cumsum(0) - 1
    return Answers(mask=mask, answer=answer, first=first, lengths=torch.bincount(answer))


@contextmanager
def answer_positions_only(head: nn.Module, mask: Tensor) -> Iterator[None]:
    """Let the output layer ``head`` compute logits (K, V), of the positions in ``mask``, instead of (B, L, V).

    An answer has about 100 tokens, its prompt with two images thousands, and a row of 152k logits takes 0.6 MB.
    """
    handle = head.register_forward_pre_hook(
        lambda module, inputs: (inputs[0][:, :-1][mask.to(inputs[0].device)],)
    )
    try:
        yield
    finally:
        handle.remove()


def token_weights(answers: Answers, weight: float, scheme: str = "sequence") -> Tensor:
    """Weight of each labeled token, (K,) float32.

    sequence: ``weight`` for the first token of an answer, (1 - weight)/(n - 1) for the others; 1 if n = 1.
    released: ``weight`` for the first, n(1 - weight)/(n - 1) for the others.
    """
    length = answers.lengths[answers.answer].to(torch.float32)
    rest = (1.0 - weight) / (length - 1).clamp(min=1)
    if scheme == "released":
        return torch.where(answers.first, weight, rest * length)
    return torch.where(answers.first, torch.where(length == 1, 1.0, weight), rest)


def first_token_loss(
    logits: Tensor,
    labels: Tensor,
    weight: float,
    scheme: str = "sequence",
    num_items: Tensor | int | None = None,
) -> Tensor:
    """Loss of one micro-batch, a () float32 tensor.

        sequence:  sum over answers of (weight * l_0 + (1 - weight) * mean(l_1 .. l_{n-1})) / num_items;  n = 1: l_0
        released:  sum over tokens of (their weight * l) / labeled tokens of this micro-batch / num_items

    Args:
        logits: (K, V), row by row (``answer_positions_only``).
        labels: (B, L) int64, -100 = ignored; padding on either side.
        weight: Share of the first token, in [0, 1].
        scheme: "sequence", or "released" as in the authors' trainer.
        num_items: Divisor with which the micro-batches of an optimizer step sum to its loss: the number of answers of
            the accumulated batch for "sequence", of its micro-batches for "released". None: of this micro-batch.

    A micro-batch without answers has loss 0 and gradient 0, so that processes stay in step.
    """
    answers = find_answers(labels)
    if logits.shape[0] == 0:
        return logits.sum() * 0.0
    losses = functional.cross_entropy(logits.float(), labels[:, 1:][answers.mask], reduction="none")
    total = (losses * token_weights(answers, weight, scheme)).sum()
    if scheme == "released":
        total = total / logits.shape[0]
        return total if num_items is None else total / num_items
    return total / (answers.lengths.shape[0] if num_items is None else num_items)
