"""The roads of an epoch: each image is scored with its own item, and trained once in a pass with its
own advantage, however many processes share the work.

All items differ in prompt, some in shape, all images in noise, and the reward says what it was asked
about, so that an exchange, a repetition or an omission changes a number.
"""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from tiny_run import sampled, tiny_options, write_rows

from paco_grpo.distributed import Strategy
from paco_grpo.training.build import build_run
from paco_grpo.training.state import make_plan
from paco_grpo.training.trainer import Trainer

SHAPES = ((16, 16), (16, 32), (16, 16))  # of the items; two share their batches
UNSCORED = 1  # item id


def about(image, item):
    return 50 * item.item_id + len(item.prompt) + np.asarray(image.convert("L")).mean()


def answers(unscored=None):
    """What ``about`` says of each image and its item; no score for the item ``unscored``."""

    def score(images, items):
        scores = [about(image, item) for image, item in zip(images, items, strict=True)]
        return [
            None if item.item_id == unscored else value
            for item, value in zip(items, scores, strict=True)
        ]

    return score


def make(flux, folder, unscored=None, **changes):
    for split in ("train", "test"):
        rows = []
        for number, (height, width) in enumerate(SHAPES):
            prompt = f"{split} {'x' * number} 1x2 grid. [LEFT]: a{number}. [RIGHT]: b."
            rows.append({"prompt": prompt, "height": height, "width": width})
        write_rows(folder / "prompts", split, rows)
    reward = f"{__name__}:answers"
    changes = {
        "item_size": "exact",
        "health__probe_images": 0,
        "sample__unique_sample_num_per_epoch": 3,
        "sample__num_steps": 4,
        "sample__noise_steps": "0,2",
        "sample__batch_size": 4,
        "sample__reward_batch_size": 5,
        "train__batch_size": 2,
        "train__max_grad_norm": 1e9,
        "train__max_missing_reward_fraction": 0.5,
        "train__reward_fn": {reward: 1},
        "train__reward_fn_kwargs": {reward: {"unscored": unscored}},
    } | changes
    return build_run(tiny_options(flux, folder, **changes))


def test_an_image_is_scored_with_its_own_item(tiny_flux_dir, tmp_path):
    run = make(tiny_flux_dir, tmp_path)
    rollouts, scores = sampled(run)
    samples = run.sampler.groups.samples(0)
    expected = []
    for number, sample in enumerate(rollouts.samples):
        position = rollouts.positions[number]
        assert sample.seeds.item() == samples.seeds[position]
        item = run.train_items[samples.item_ids[position]]
        assert (sample.item_ids.item(), sample.height, sample.width) == (
            item.item_id,
            item.height,
            item.width,
        )
        text = run.state.policy.encode([item]).prompt_embeds
        assert torch.equal(sample.conditioning.prompt_embeds, text)
        (image,) = run.state.policy.decode(sample.clean_latents, item.height, item.width)
        expected.append(about(image, item))
    assert np.diff(np.sort(expected)).min() > 1e-3
    np.testing.assert_allclose(scores[:, 0], expected, atol=5e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"train__gradient_step_per_epoch": 3, "train__loss_type": "nft"},
        {"train__gradient_step_per_epoch": 2, "train__loss_type": "dgpo", "sample__noise_level": 0},
    ],
)
def test_a_sample_is_trained_once_in_a_pass_with_its_own_advantage(
    tiny_flux_dir, tmp_path, changes
):
    changes = {"train__num_sigmas": 2, "train__sigma_fraction": 1.0} | changes
    run = make(tiny_flux_dir, tmp_path, unscored=UNSCORED, **changes)
    rollouts, scores = sampled(run)
    totals = pd.Series(scores[:, 0], [sample.seeds.item() for sample in rollouts.samples])
    groups = totals.groupby(rollouts.item_ids[rollouts.positions])
    advantages = (totals - groups.transform("mean")) / groups.transform("std", ddof=0)
    advantage_of = advantages.dropna().to_dict()
    assert len(advantage_of) == 8  # by seed; the others have no score

    trained = Counter()
    loss = run.objective.loss

    def record(step, policy):
        for seed, advantage in zip(step.rollout.seeds.tolist(), step.advantages, strict=True):
            trained[step.inner_epoch, step.index, seed] += 1
            assert advantage.item() == pytest.approx(advantage_of[seed], abs=1e-4)
        return loss(step, policy)

    run.objective.loss = record
    Trainer(run).epoch()
    assert set(trained.values()) == {1}
    for inner_epoch in range(run.options.train.num_inner_epochs):
        steps = {step for inner, step, _ in trained if inner == inner_epoch}
        assert len(steps) == 2
        for step in steps:
            seeds = {seed for *key, seed in trained if key == [inner_epoch, step]}
            assert seeds == set(advantage_of)


def test_two_processes_sample_and_train_what_one_would(tiny_flux_dir, tmp_path):
    """Both in this process, one after the other; sums over the processes are taken here."""
    run = make(tiny_flux_dir, tmp_path, sample__same_latent=True)
    state = run.state
    advantages = np.random.default_rng(0).normal(size=12)
    kept = np.arange(12) != 5
    gradients = []
    state.optimizer.step = lambda: gradients.append(
        torch.cat([parameter.grad.flatten() for parameter in state.parameters.values()])
    )
    reductions = set()

    def reduce(tensor, reduction):
        reductions.add(reduction)
        return tensor

    latents = {}
    randoms = []  # of users' rewards
    strategy = state.strategy
    for processes, rank in ((1, 0), (2, 0), (2, 1)):
        if processes > 1:
            fake = SimpleNamespace(
                process_index=rank,
                num_processes=processes,
                device=strategy.accelerator.device,
                reduce=reduce,
            )
            strategy = state.strategy = Strategy(fake)
        run.seed_generators()
        randoms.append(np.random.random())
        run.sampler.batch_size = make_plan(run.options, processes, 1).sample_batch_size
        rollouts = run.sampler.sample(lambda *_: None)
        for number, position in enumerate(rollouts.positions.tolist()):
            latents[processes, position] = rollouts.samples[number].clean_latents
        run.updater.update(rollouts, advantages, kept, epoch=0)
    assert reductions == {"sum"}
    state.epoch = 1
    run.seed_generators()
    randoms.append(np.random.random())
    assert randoms[0] == randoms[1] and len(set(randoms)) == 3
    for position in range(12):
        torch.testing.assert_close(latents[2, position], latents[1, position], rtol=1e-4, atol=1e-5)
    distinct = torch.stack([latent.flatten()[:64] for latent in latents.values()])
    assert len(distinct.round(decimals=2).unique(dim=0)) == 12
    whole, first, second = gradients
    largest = float(whole.abs().max())
    assert largest > 0
    torch.testing.assert_close(first + second, whole, rtol=1e-3, atol=1e-4 * largest)
