"""The first-token-weighted loss against plain NumPy in float64."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paco_reward.loss import answer_positions_only, find_answers, first_token_loss_func


def first_token_loss(logits, labels, weight, scheme="sequence", num_items=None):
    """The loss of logits (B, L, V) of all positions."""
    outputs = {"logits": logits[:, :-1][find_answers(labels).mask]}
    return first_token_loss_func(outputs, labels, num_items, weight, scheme)


def numpy_answers(logits, labels):
    """Cross-entropies of each answer, as a list of float64 arrays; deliberately in plain loops."""
    answers = []
    for row_logits, row_labels in zip(np.asarray(logits, np.float64), np.asarray(labels)):
        current = None
        for position in range(1, len(row_labels)):
            if row_labels[position] == -100:
                current = None
                continue
            if current is None:
                current = []
                answers.append(current)
            scores = row_logits[position - 1]
            peak = scores.max()
            current.append(
                peak + np.log(np.exp(scores - peak).sum()) - scores[row_labels[position]]
            )
    return [np.array(answer) for answer in answers]


def numpy_sequence(batches, weight):
    """Loss of one optimizer step over micro-batches: mean over all sequences."""
    losses = []
    for answer in [answer for batch in batches for answer in numpy_answers(*batch)]:
        losses.append(
            answer[0] if len(answer) == 1 else weight * answer[0] + (1 - weight) * answer[1:].mean()
        )
    return float(np.mean(losses))


def numpy_released(batches, weight):
    """The authors' trainer: weighted sum / answer tokens of a micro-batch, mean over these."""
    values = []
    for batch in batches:
        answers = numpy_answers(*batch)
        total = 0.0
        for answer in answers:
            n = len(answer)
            total += weight * answer[0] + sum(
                n * (1 - weight) / (n - 1) * loss for loss in answer[1:]
            )
        values.append(total / sum(len(answer) for answer in answers))
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


@settings(max_examples=25)
@given(batches, weights)
def test_both_schemes_equal_numpy(batch, weight):
    for scheme, expected in (("sequence", numpy_sequence), ("released", numpy_released)):
        loss = first_token_loss(*tensors(batch), weight, scheme)
        assert loss.item() == pytest.approx(expected([batch], weight), abs=1e-6, rel=1e-6)


@settings(max_examples=25)
@given(st.lists(batches, min_size=2, max_size=4), weights)
def test_accumulated_micro_batches_sum_to_the_loss_of_the_step(micro_batches, weight):
    """Micro-batches with different answer lengths and numbers of answers."""
    micro_batches[0] = (micro_batches[0][0][:1], micro_batches[0][1][:1])  # fewer sequences
    items = sum(len(find_answers(torch.tensor(labels)).lengths) for _, labels in micro_batches)
    total = sum(
        first_token_loss(*tensors(batch), weight, "sequence", items) for batch in micro_batches
    )
    assert total.item() == pytest.approx(numpy_sequence(micro_batches, weight), abs=1e-6, rel=1e-6)
    parts = [
        first_token_loss(*tensors(b), weight, "released", len(micro_batches)) for b in micro_batches
    ]
    assert sum(parts).item() == pytest.approx(
        numpy_released(micro_batches, weight), abs=1e-6, rel=1e-6
    )


def test_a_batch_without_answers_has_zero_loss_and_gradient():
    logits = torch.randn(2, 5, 3, requires_grad=True)
    loss = first_token_loss(logits, torch.full((2, 5), -100), 0.1, num_items=torch.tensor(1))
    loss.backward()
    assert loss.item() == 0 and not logits.grad.any()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("scheme", ["sequence", "released"])
def test_logits_of_the_answers_alone_give_the_same_loss_and_gradients(
    scheme, checkpointing, scorer
):
    """The judge in float64 against all logits; answers are at different places, two in one row."""
    model = copy.deepcopy(scorer.model).double().train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.from_numpy(np.random.default_rng(0).integers(5, 200, (3, 64)))
    labels = torch.full_like(ids, -100)
    for row, answer in (
        (0, slice(50, 60)),
        (1, slice(3, 9)),
        (2, slice(20, 23)),
        (2, slice(40, 47)),
    ):
        labels[row, answer] = ids[row, answer]
    parameters = [parameter for name, parameter in model.named_parameters() if "visual" not in name]
    answers = find_answers(labels).mask

    def value(logits):
        found = first_token_loss_func({"logits": logits}, labels, None, 0.1, scheme)
        return found, torch.autograd.grad(found, parameters)

    expected, gradients = value(model(input_ids=ids).logits[:, :-1][answers])
    with answer_positions_only(model.get_output_embeddings(), answers):
        logits = model(input_ids=ids).logits
        found, own = value(logits)
    assert logits.shape == (26, model.config.text_config.vocab_size)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)  # the loss is float32
    for a, b in zip(own, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
    assert model(input_ids=ids).logits.shape == (
        *ids.shape,
        logits.shape[1],
    )  # the layer is as before
