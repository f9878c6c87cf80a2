"""Which images an objective trains, and at which steps they are noisy, in whole runs."""

import numpy as np
import pytest
import torch
from own_objectives import Extremes
from tiny_run import rows_of, sampled, tiny_options

from paco_grpo.distributed import Shares
from paco_grpo.options import ConfigError
from paco_grpo.training.build import build_run
from paco_grpo.training.sample import Rollouts
from paco_grpo.training.stopping import TrainingStopped
from paco_grpo.training.trainer import Trainer

# Clipped at 5. The best and the worst are among the first ones, which are of the first chunk.
ADVANTAGES = np.array([7.0, 6.0, -1.2, -0.9, -0.8, 0.2, -0.4, 0.1])


@pytest.fixture
def make(tiny_flux_dir, tmp_path):
    """A run on eight images of two items; options as in ``tiny_options``."""
    names = iter("abcdef")

    def build(loss_type, **changes):
        small = {"train__batch_size": 1, "health__probe_images": 0, "run_name": next(names)}
        changes = small | {"train__loss_type": loss_type} | changes
        return build_run(tiny_options(tiny_flux_dir, tmp_path, **changes))

    return build


def alone(rollouts, mask):
    """Only the images of ``mask``, as if no other one had been sampled."""
    (numbers,) = np.nonzero(mask)
    return Rollouts(
        item_ids=rollouts.item_ids[mask],
        datasets=rollouts.datasets[mask],
        shares=Shares(0, 1, len(numbers)),
        samples=[rollouts.samples[number] for number in numbers],
        keys=[rollouts.keys[number] for number in numbers],
        finite=rollouts.finite[mask],
    )


def update(run, rollouts, advantages, kept):
    """Metrics, trained weights, and the number of forwards."""
    forwards = []
    run.state.policy.transformer.register_forward_hook(lambda *_: forwards.append(1))
    metrics = run.updater.update(rollouts, advantages, kept, epoch=0)
    return metrics, list(run.state.parameters.values()), len(forwards)


@pytest.mark.parametrize(
    ("batch_size", "steps", "missing"), [(1, 2, ()), (1, 1, (2, 3)), (3, 1, ())]
)
def test_an_update_is_that_of_the_kept_images_alone(make, batch_size, steps, missing):
    """In two optimizer steps; the missing images had the worst score of an item."""
    changes = {"train__gradient_step_per_epoch": steps, "train__batch_size": batch_size}
    changes |= {"train__num_inner_epochs": 1, "train__old_log_prob": "recompute"}
    run = make("own_objectives:Extremes", **changes)
    rollouts = sampled(run)[0]
    scored = np.ones(8, bool)
    scored[list(missing)] = False
    (members,) = np.nonzero(scored)
    mask = np.zeros(8, bool)
    mask[members] = Extremes(run.options).keep(ADVANTAGES[scored], rollouts.item_ids[scored])
    assert mask.sum() == 4 and (missing or mask[:4].sum() != 2)
    found = update(run, rollouts, ADVANTAGES, scored)
    other = make("ppo", **changes)
    same = sampled(other)[0]
    other.updater.recompute_old_log_probs(same)
    expected = update(other, alone(same, mask), ADVANTAGES[mask], np.ones(4, bool))
    assert found[0].pop("kept_share") == 4 / scored.sum()
    if batch_size == 1:
        assert found[0] == expected[0]
        assert found[2] == expected[2] + 4  # one more to recompute each
    for weight, expected_weight in zip(found[1], expected[1], strict=True):
        if batch_size == 1:
            assert torch.equal(weight, expected_weight)
        else:
            torch.testing.assert_close(weight, expected_weight, atol=1e-6, rtol=0)


def test_the_first_pass_computes_the_reference_for_the_loss(make):
    """dpo trains four images at one σ: two forwards, and one for the update, with a KL weight."""
    run = make("dpo", sample__noise_level=0, train__beta=0.1)
    rollouts = sampled(run)[0]
    scored = run.objective.keep(ADVANTAGES, rollouts.item_ids)  # the others have no advantage
    metrics, _, forwards = update(run, rollouts, ADVANTAGES, scored)
    assert forwards == 4 * 3
    assert metrics["kept_share"] == 1
    assert metrics["kl"] == 0 and metrics["policy_loss"] == pytest.approx(np.log(2))


def test_nothing_to_train_is_said_and_ends_after_ten_epochs(make, caplog):
    run = make("own_objectives:Nothing", num_epochs=12, save_freq=20, train__num_inner_epochs=2)
    with pytest.raises(TrainingStopped, match="in 10 epochs, no image .*'own_objectives:Nothing'"):
        Trainer(run).fit()
    assert run.state.optimizer_steps == 0 and "in epoch 4, " in caplog.text
    assert (run.folder / "checkpoints" / "epoch_0010").is_dir()
    assert len(rows_of(run.options, "train")) == 10


def test_numbers_instead_of_a_mask_are_refused(make):
    run = make("own_objectives:Numbers")
    with pytest.raises(ConfigError, match=r"'own_objectives:Numbers': keep .* 8 booleans"):
        update(run, sampled(run)[0], ADVANTAGES, np.ones(8, bool))


def test_noise_outside_of_the_schedule_is_refused(make):
    run = make("own_objectives:Late")
    assert [step.index for step in sampled(run)[0].samples[0].noise_steps] == [1, 2]
    run.state.epoch = 1
    with pytest.raises(ConfigError, match=r"noise_steps\(1\) returns \[1, 3\].* steps 0 to 2"):
        sampled(run)


def test_noise_steps_that_are_never_trained_are_refused_at_the_start(make):
    """In the third of three epochs, noise is at the steps 2 and 3."""
    changes = {"sample__num_steps": 5, "sample__noise_steps": "0,1,2,3", "train__timesteps": "0,1"}
    make("own_objectives:Window", num_epochs=2, **changes)
    with pytest.raises(ConfigError, match=r"config\.train\.timesteps.*noise_steps\(2\).*2, 3"):
        make("own_objectives:Window", num_epochs=3, **changes)


def test_an_objective_that_chooses_no_step_is_refused(make):
    run = make("own_objectives:Unchosen", seed=7)
    with pytest.raises(ConfigError, match="'own_objectives:Unchosen': steps .*epoch 1"):
        update(run, sampled(run)[0], ADVANTAGES, np.ones(8, bool))
