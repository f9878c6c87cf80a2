"""Every option does what it says: set it, and look at what a tiny run then does.

That each option is read at all is tested in tests/config/test_schema.py.
"""

import dataclasses
from pathlib import Path

import pytest
import torch
from tiny_run import rows_of, tiny_options

from paco_grpo.objectives import Step
from paco_grpo.policies import lora
from paco_grpo.training.build import build_run
from paco_grpo.training.state import merges_lora
from paco_grpo.training.trainer import Trainer


@pytest.fixture(scope="module")
def make(tiny_flux_dir, tmp_path_factory):
    """``make(group__option=value)``: a run that is ready to train."""

    def build(**changes):
        changes = {"health__probe_images": 0} | changes
        return build_run(tiny_options(tiny_flux_dir, tmp_path_factory.mktemp("options"), **changes))

    return build


def trained_steps(run) -> list[Step]:
    """The steps that the objective of ``run`` gets in one epoch."""
    steps = []
    loss = run.objective.loss

    def recording(step, policy):
        steps.append(step)
        return loss(step, policy)

    run.objective.loss = recording
    Trainer(run).epoch()
    return steps


def test_the_optimizer_has_the_values_of_its_options(make):
    run = make(
        train__learning_rate=0.003,
        train__adam_beta1=0.8,
        train__adam_beta2=0.95,
        train__adam_epsilon=1e-5,
        train__adam_weight_decay=0.125,
    )
    (group,) = run.state.optimizer.param_groups
    assert group["lr"] == 0.003
    assert group["betas"] == (0.8, 0.95)
    assert group["eps"] == 1e-5
    assert group["weight_decay"] == 0.125


def test_max_grad_norm(make):
    run = make(train__max_grad_norm=0.001)
    norms = []

    def measure(optimizer, *_):
        gradients = [p.grad.flatten() for p in run.state.parameters.values()]
        norms.append(torch.cat(gradients).norm().item())

    run.state.optimizer.register_step_pre_hook(measure)
    Trainer(run).epoch()
    (row,) = rows_of(run.options, "train")
    assert row["train/grad_norm"] > 0.002
    assert norms == [pytest.approx(0.001, rel=1e-3)]


@pytest.mark.parametrize(
    ("changes", "recorded", "trained"),
    [
        ({"sample__noise_steps": "0,1", "train__timesteps": "0"}, [0, 1], {0}),
        ({"train__timesteps": "2", "train__loss_type": "nft"}, [1], {2}),
    ],
)
def test_which_steps_have_noise_and_which_are_trained(changes, recorded, trained, make):
    steps = trained_steps(make(**changes))
    assert {step.index for step in steps} == trained
    for step in steps:
        assert [noise_step.index for noise_step in step.rollout.noise_steps] == recorded


def test_what_the_transformer_gets(make):
    """Image size, guidance, text length, noise, and the number of steps with a shorter tail."""
    run = make(
        train__resolution=24,
        sample__guidance_scale=2.5,
        max_sequence_length=8,
        sample__num_steps=6,
        sample__tail_steps=1,
        sample__noise_level=0.3,
        sample__transition="dance_sde",
    )
    calls = []

    def record(module, args, inputs):
        if not torch.is_grad_enabled():
            calls.append(inputs)

    run.state.policy.transformer.register_forward_pre_hook(record, with_kwargs=True)
    step = trained_steps(run)[0]
    assert (step.rollout.height, step.rollout.width) == (24, 24)
    assert len(step.rollout.sigmas) == 7
    assert (step.rollout.noise_level, step.rollout.transition) == (0.3, "dance_sde")
    assert {inputs["encoder_hidden_states"].shape[1] for inputs in calls} == {8}
    guidance = torch.cat([inputs["guidance"] for inputs in calls])
    assert set(guidance.tolist()) == {2.5}
    batches = 2  # of four images
    assert len(calls) == batches * 3  # one step, the one with noise, and the tail


# Adam's steps then show the size of gradients, not their sign alone.
LARGE_STEPS = {
    "train__adam_epsilon": 1.0,
    "train__learning_rate": 1.0,
    "sample__unique_sample_num_per_epoch": 4,
    "train__reward_fn": "{'reward_factories:gaps': 1}",
    "train__max_missing_reward_fraction": 0.5,
}


def update_of(run) -> torch.Tensor:
    """What an epoch adds to the trained weights."""
    parameters = list(run.state.parameters.values())
    before = torch.cat([p.detach().flatten() for p in parameters])
    Trainer(run).epoch()
    return torch.cat([p.detach().flatten() for p in parameters]) - before


@pytest.fixture(scope="module")
def plain_update(make) -> torch.Tensor:
    return update_of(make(**LARGE_STEPS))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("train__batch_size", 1),
        ("enable_gradient_checkpointing", True),
    ],
)
def test_options_that_must_not_change_the_update(option, value, make, plain_update):
    largest = float(plain_update.abs().max())
    assert largest > 0
    update = update_of(make(**LARGE_STEPS, **{option: value}))
    torch.testing.assert_close(update, plain_update, rtol=1e-3, atol=1e-5 * largest)


def test_steps_without_noise_are_merged_where_that_only_rounds(make):
    options = make().options
    cpu = torch.device("cpu")
    assert merges_lora(options, cpu)
    assert not merges_lora(options, torch.device("cuda"))
    assert not merges_lora(dataclasses.replace(options, mixed_precision="bf16"), cpu)


def ranks_of(run) -> set[int]:
    return {min(parameter.shape) for parameter in run.state.parameters.values()}


def test_lora_size_and_start(make):
    run = make(num_epochs=1, eval_freq=0)
    Trainer(run).fit()
    assert ranks_of(run) == {8}
    other = make(train__lora_rank=2, train__lora_alpha=6)
    assert ranks_of(other) == {2}
    of_another_seed = make(train__lora_rank=2, seed=7)
    for name, parameter in of_another_seed.state.parameters.items():
        assert torch.equal(parameter, other.state.parameters[name]) == ("lora_B" in name)
    assert other.state.policy.transformer.peft_config["default"].lora_alpha == 6

    adapter = Path(run.folder) / "checkpoints" / "epoch_0001" / "adapter"
    started = make(train__lora_path=str(adapter))
    for name, parameter in started.state.parameters.items():
        assert torch.equal(parameter, run.state.ema.shadow[name])


def test_no_average(make):
    assert make(train__ema=False).state.ema is None


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_test_rewards_may_differ(scale, make):
    """Brightness is loaded once where training and test agree."""
    run = make(
        test__reward_fn="{'tiny_run:brightness': 1, 'jpeg_compressibility': 1}",
        test__reward_fn_kwargs=f"{{'tiny_run:brightness': {{'scale': {scale}}}}}",
        train__reward_fn_kwargs="{'tiny_run:brightness': {'scale': 1.0}}",
    )
    assert set(run.rewards.test) == {"brightness", "jpeg_compressibility"}
    is_shared = run.rewards.test["brightness"] is run.rewards.train["brightness"]
    assert is_shared == (scale == 1.0)


@pytest.mark.parametrize(
    ("changes", "steps", "name", "kept", "sampled"),
    [
        ({"train__loss_type": "nft"}, 299, "old", 0.3, "old"),
        ({"train__loss_type": "awm", "train__num_inner_epochs": 2}, 9, "old", 0.0, "default"),
        ({"train__loss_type": "dgpo"}, 199, "slow", 0.2, "default"),
        ({"train__loss_type": "dgpo"}, 200, "slow", 0.201, "slow"),
        ({"train__loss_type": "dgpo"}, 499, "slow", 0.3, "slow"),
    ],
)
def test_how_a_copy_follows_and_what_images_are_sampled_with(
    changes, steps, name, kept, sampled, make
):
    """``steps`` optimizer steps before the epoch; of the old weights, the copy keeps a share."""
    run = make(train__num_sigmas=1, **changes)
    run.state.optimizer_steps = steps
    before = {key: weight.detach().clone() for key, weight in run.state.parameters.items()}
    layer = lora.lora_layers(run.state.policy)[0]
    active = []
    sample = run.sampler.sample

    def record(*arguments):
        active.append(list(layer.active_adapters))
        return sample(*arguments)

    run.sampler.sample = record
    Trainer(run).epoch()
    assert active == [[sampled]]
    for parameter, new in run.state.parameters.items():
        copied = run.state.snapshots[name][parameter.replace(".default.", f".{name}.")]
        expected = before[parameter].lerp(new.detach(), 1 - kept)
        torch.testing.assert_close(copied, expected, rtol=0, atol=1e-6)
    assert (new - before[parameter]).abs().max() > 1e-4
