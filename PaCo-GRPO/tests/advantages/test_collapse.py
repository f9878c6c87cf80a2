"""Which rewards keep a choice open (docs/rewards.md): exact policy gradients of a small generator, in float64.

An image has four panels, each with one of K answers. With probability s, one answer ~ p = softmax(logits) holds for the whole
image; else each panel draws its own. c is an image's agreement, b the expected agreement of its panels with other images'.
A reward collapses the choice if its gradient, with the other images fixed as in GRPO, raises the most frequent answer.
"""

import itertools

import pytest
import torch

K = 5
IMAGES = torch.tensor(list(itertools.product(range(K), repeat=4)))  # all (K^4, 4)
LOGITS = torch.tensor([0.05, *[0.0] * (K - 1)], dtype=torch.float64)  # the first answer is slightly more frequent


def drift(reward, s):
    """Exact expected gradient towards the first answer, against the others, and the means of c and b."""
    logits = LOGITS.clone().requires_grad_()
    log_p = logits.log_softmax(0)
    equal = (IMAGES == IMAGES[:, :1]).all(dim=1)
    probability = (1 - s) * log_p[IMAGES].sum(dim=1).exp() + s * equal * log_p[IMAGES[:, 0]].exp()
    c = torch.stack([IMAGES[:, i] == IMAGES[:, j] for i, j in itertools.combinations(range(4), 2)]).double().mean(dim=0)
    b = log_p.exp()[IMAGES].mean(dim=1)  # of another image's panel, the distribution is p
    value = reward(c, b).detach()
    (gradient,) = torch.autograd.grad((probability * value).sum(), logits)
    means = [(probability * x).sum().item() for x in (c, b)]
    return (gradient[0] - gradient[1:].mean()).item(), *means


@pytest.mark.parametrize("s", [0.0, 0.2, 0.8])
def test_consistency_alone_collapses_and_a_sum_needs_twice_the_weight(s):
    """Each image is charged for half of a pair, so with weight 1 half of the force is left where panels are independent."""
    plain, *_ = drift(lambda c, b: c, s)
    assert plain > 0
    halved, balanced = (drift(lambda c, b, w=w: c - w * b, s)[0] for w in (1.0, 2.0))
    if s == 0:
        assert halved == pytest.approx(plain / 2) and balanced == pytest.approx(0, abs=1e-12)
    assert balanced < halved < plain


@pytest.mark.parametrize("s", [0.1, 0.3, 0.8])
def test_a_product_holds_the_choice_where_its_slope_is_large_enough(s):
    """The exponent times c / (1 − b) takes the place of the weight: 2 is enough."""
    _, c, b = drift(lambda c, b: c, s)
    enough = 2 * (1 - b) / c
    assert drift(lambda c, b: c * (1 - b) ** enough, s)[0] < 0
    if s == 0.1:
        assert drift(lambda c, b: c * (1 - b), s)[0] > 0
