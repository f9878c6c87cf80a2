"""The first-token-weighted loss against plain NumPy in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax

from paco_reward.loss import answer_positions_only, find_answers, first_token_loss_func


def first_token_loss(logits, labels, weight, scheme="sequence", num_items=None):
    """The loss of logits (B, L, V) of all positions."""
    outputs = {"logits": logits[:, :-1][find_answers(labels).mask]}
    return first_token_loss_func(outputs, labels, num_items, weight, scheme)


def numpy_answers(logits, labels):
    """Cross-entropies of each answer, as a list of float64 arrays; deliberately in plain loops."""
    log_probs = log_softmax(logits, axis=-1)
    answers = []
    for row, row_labels in enumerate(labels):
        for position in range(1, len(row_labels)):
            label = row_labels[position]
            if label == -100:
                continue
            if row_labels[position - 1] == -100 or position == 1:
                answers.append([])
            answers[-1].append(-log_probs[row, position - 1, label])
    return [np.array(answer) for answer in answers]


def numpy_sequence(batches, weight):
    """Loss of one optimizer step over micro-batches: mean over all sequences."""
    losses = []
    for batch in batches:
        for first, *others in numpy_answers(*batch):
            losses.append(weight * first + (1 - weight) * np.mean(others) if others else first)
    return float(np.mean(losses))


def numpy_released(batches, weight):
    """The authors' trainer: weighted sum / answer tokens of a micro-batch, mean over these."""
    values = []
    for batch in batches:
        total = 0.0
        tokens = 0
        for first, *others in numpy_answers(*batch):
            length = 1 + len(others)
            tokens += length
            total += weight * first
            if others:
                total += length * (1 - weight) * np.mean(others)
        values.append(total / tokens)
    return float(np.mean(values))


def make_batch(seed, lengths, prompts, width, vocabulary, left):
    """Logits and padded labels with answers of the given lengths."""
    generator = np.random.default_rng(seed)
    labels = np.full((len(lengths), width), -100)
    for row, (length, prompt) in enumerate(zip(lengths, prompts)):
        start = width - length if left else prompt
        labels[row, start : start + length] = generator.integers(0, vocabulary, length)
    return generator.normal(size=(len(lengths), width, vocabulary)) * 3, labels


def tensors(batch):
    return torch.tensor(batch[0], dtype=torch.float32), torch.tensor(batch[1])


batches = st.builds(
    make_batch,
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(1, 6), min_size=3, max_size=3),
    prompts=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    width=st.just(12),
    vocabulary=st.integers(2, 9),
    left=st.booleans(),
)
weights = st.floats(0, 1)


@settings(max_examples=40)
@given(st.lists(batches, min_size=1, max_size=4), weights)
def test_micro_batches_sum_to_the_loss_of_the_step(micro_batches, weight):
    """With different answer lengths and numbers of answers; one of them is its whole step."""
    logits, labels = micro_batches[0]
    micro_batches[0] = (logits[:2], labels[:2])
    answers = sum(len(numpy_answers(*batch)) for batch in micro_batches)
    for scheme, expected, items in (
        ("sequence", numpy_sequence, answers),
        ("released", numpy_released, len(micro_batches)),
    ):
        total = sum(first_token_loss(*tensors(b), weight, scheme, items) for b in micro_batches)
        step = expected(micro_batches, weight)
        assert total.item() == pytest.approx(step, abs=1e-6, rel=1e-6)
        alone = first_token_loss(*tensors(micro_batches[0]), weight, scheme)
        assert alone.item() == pytest.approx(
            expected(micro_batches[:1], weight), abs=1e-6, rel=1e-6
        )


def test_a_batch_without_answers_has_zero_loss_and_gradient():
    logits = torch.randn(2, 5, 3, requires_grad=True)
    loss = first_token_loss(logits, torch.full((2, 5), -100), 0.1, num_items=torch.tensor(1))
    loss.backward()
    assert loss.item() == 0 and not logits.grad.any()


def test_the_head_computes_the_logits_of_the_answers_alone():
    """Of answers at different places, two in one row."""
    head = torch.nn.Linear(8, 5)
    hidden_states = torch.randn(3, 64, 8)
    labels = torch.full((3, 64), -100)
    for row, start, end in ((0, 50, 60), (1, 3, 9), (2, 20, 23), (2, 40, 47)):
        labels[row, start:end] = 1
    whole = head(hidden_states)
    with answer_positions_only(head, find_answers(labels).mask):
        logits = head(hidden_states)
    torch.testing.assert_close(logits, whole[:, :-1][labels[:, 1:] == 1])
    assert torch.equal(head(hidden_states), whole)  # the layer is as before
