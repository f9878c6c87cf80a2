"""Every option does what it says: change it, and see the effect on tiny runs."""

import dataclasses
import functools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_run import rows_of, sampled, tiny_edit_options, tiny_options

from paco_grpo.options import ConfigError
from paco_grpo.training.build import build_run
from paco_grpo.training.plan import merges_lora
from paco_grpo.training.trainer import Trainer


@pytest.fixture(scope="module")
def make(tiny_flux_dir, tmp_path_factory):
    def build(**changes):
        changes = {"health__probe_images": 0} | changes
        return build_run(tiny_options(tiny_flux_dir, tmp_path_factory.mktemp("options"), **changes))

    return build


def test_sampling_does_not_depend_on_the_batch(make):
    run = make()
    (_, four, scores_four), (_, three, scores_three) = (
        sampled(run, batch_size=size) for size in (4, 3)
    )
    torch.testing.assert_close(four, three, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(scores_four, scores_three, atol=0.5)


def one_epoch(run):
    Trainer(run).epoch()
    return run


@pytest.fixture(scope="module")
def weights_after(make):
    """The trained weights after an epoch with changed options; each set of options runs once."""

    @functools.cache
    def weights(changes: tuple) -> torch.Tensor:
        return torch.cat(
            [
                p.detach().flatten()
                for p in one_epoch(make(**dict(changes))).state.parameters.values()
            ]
        )

    return lambda **changes: weights(tuple(sorted(changes.items())))


FLAT = {
    "train__adam_epsilon": 0.1
}  # Adam's steps then show the size of gradients, not their sign alone
TWO_STEPS = {"train__gradient_step_per_epoch": 2}
TWO_REWARDS = {"train__reward_fn": "{'tiny_run:brightness': 1, 'tiny_run:redness': 20}"}
SUM = {
    "name": "weighted_advantage_sum_aggregate_fn",
    "arguments": {"reward_weights": {"brightness": 0, "redness": 1}},
}


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


@pytest.mark.parametrize(
    ("changes", "others"),
    [
        ({"seed": 1}, {}),
        ({"train__learning_rate": 1e-4}, {}),
        ({"train__adam_weight_decay": 5.0}, {}),
        ({"train__adam_epsilon": 0.1}, {}),
        ({"train__adam_beta1": 0.5}, TWO_STEPS),
        ({"train__adam_beta2": 0.5}, TWO_STEPS),
        ({"train__max_grad_norm": 1e-9}, {"train__adam_epsilon": 1e-4}),
        ({"train__num_inner_epochs": 2}, {}),
        (TWO_STEPS, {}),
        ({"train__clip_range": 10.0}, TWO_STEPS),
        ({"train__beta": 1.0}, TWO_STEPS),
        ({"train__resolution": 24}, {}),
        ({"train__rank_grpo": True}, FLAT),
        ({"train__adv_clip_max": 0.1}, FLAT),
        ({"sample__noise_steps": "0,1"}, {}),
        ({"sample__num_noise_steps": 1}, {"sample__noise_steps": "0,1"}),
        ({"train__timesteps": "0"}, {"sample__noise_steps": "0,1"}),
        ({"sample__noise_level": 0.3}, {}),
        ({"sample__cps": True}, {}),
        ({"sample__same_latent": True}, {}),
        ({"sample__latents_per_prompt": 2}, {"sample__same_latent": True}),
        ({"sample__guidance_scale": 1.0}, {}),
        ({"sample__global_std": True}, FLAT),
        ({"sample__num_images_per_prompt": 8}, {}),
        ({"sample__unique_sample_num_per_epoch": 4}, {}),
        ({"sample__num_steps": 4}, {}),
        ({"sample__tail_steps": 1}, {"sample__num_steps": 6} | FLAT),
        ({"per_prompt_stat_tracking": False}, {}),
        ({"max_sequence_length": 8}, {}),
        ({"train__nft_beta": 0.1}, {"train__loss_type": "nft"} | TWO_STEPS),
        ({"train__timesteps": "2"}, {"train__loss_type": "nft"}),
        ({"train__reward_fn_kwargs": "{'tiny_run:brightness': {'scale': -1.0}}"}, {}),
        ({"train__aggregate_fn": "tiny_run:reversed_aggregate"}, {}),
        ({"train__aggregate_fn": str(SUM)}, TWO_REWARDS),
    ],
    ids=lambda changes: ",".join(f"{k}={v}" for k, v in changes.items()),
)  # fmt: skip
@pytest.mark.slow
def test_option_changes_the_update(weights_after, changes, others):
    weights = weights_after(**others, **changes)
    assert torch.isfinite(weights).all()
    assert (weights - weights_after(**others)).abs().max() > 1e-7


def test_options_that_must_not_change_the_update(weights_after):
    common = {
        "train__adam_epsilon": 1.0, "train__learning_rate": 1.0, "sample__unique_sample_num_per_epoch": 4,
        "train__reward_fn": "{'reward_factories:gaps': 1}", "train__max_missing_reward_fraction": 0.5,
    }  # fmt: skip
    start = weights_after(**common | {"train__learning_rate": 0})
    step = weights_after(**common) - start
    assert step.any()
    for name, value in (
        ("train__batch_size", 1), ("train__batch_size", 100), ("enable_gradient_checkpointing", True),
        ("sample__reward_batch_size", 1),
    ):  # fmt: skip
        changed = weights_after(**common, **{name: value}) - start
        torch.testing.assert_close(
            changed, step, rtol=1e-3, atol=1e-5 * float(step.abs().max()), msg=name
        )


def test_steps_without_noise_are_merged_where_that_only_rounds(make):
    options, cpu = make().options, torch.device("cpu")
    assert merges_lora(options, cpu) and not merges_lora(options, torch.device("cuda"))
    assert not merges_lora(dataclasses.replace(options, mixed_precision="bf16"), cpu)


def test_lora_size_and_start(make):
    run = make(num_epochs=1, eval_freq=0)
    Trainer(run).fit()
    sizes = {name: p.shape for name, p in run.state.parameters.items()}
    assert {min(shape) for shape in sizes.values()} == {8}
    other = make(train__lora_rank=2, train__lora_alpha=6)
    assert {min(p.shape) for p in other.state.parameters.values()} == {2}
    assert other.state.policy.transformer.peft_config["default"].lora_alpha == 6
    adapter = Path(run.folder) / "checkpoints" / "epoch_0001" / "adapter"
    started = make(train__lora_path=str(adapter))
    assert all(
        torch.equal(p, run.state.ema.shadow[name]) for name, p in started.state.parameters.items()
    )


def test_full_training_without_lora(make):
    run = make(num_epochs=1, use_lora=False, train__learning_rate=1e-4)
    Trainer(run).fit()
    assert all("lora" not in name for name in run.state.parameters)
    assert (run.folder / "checkpoints" / "epoch_0001" / "transformer").is_dir()


def test_options_of_the_evaluation(make):
    images, sizes = set(), []
    for changes in ({}, {"test__num_steps": 3}, {"test__seed": 5}, {"test__resolution": 40}):
        run = make(num_epochs=0, sample__reward_batch_size=2, **changes)
        score = run.rewards.test["brightness"]
        run.rewards.test["brightness"] = lambda *given, score=score: (
            sizes.append(len(given[0])) or score(*given)
        )
        Trainer(run).fit()
        images.add((run.folder / "eval" / "epoch_0000" / "00003.png").read_bytes())
    assert len(images) == 4 and sizes == [2, 2, 1] * 4


def test_ema_and_8_bit_adam(make, monkeypatch):
    run = one_epoch(make(**TWO_STEPS, train__ema_decay=0.0, train__ema_update_interval=2))
    assert all(torch.equal(p, run.state.ema.shadow[n]) for n, p in run.state.parameters.items())
    assert make(train__ema=False).state.ema is None
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match="use_8bit_adam=True needs bitsandbytes"):
        make(train__use_8bit_adam=True)


def test_test_rewards_may_differ(make):
    for scale in (1.0, 5.0):  # brightness is loaded once where training and test agree
        run = make(
            test__reward_fn="{'tiny_run:brightness': 1, 'jpeg_compressibility': 1}",
            test__reward_fn_kwargs=f"{{'tiny_run:brightness': {{'scale': {scale}}}}}",
            train__reward_fn_kwargs="{'tiny_run:brightness': {'scale': 1.0}}",
        )
        assert set(run.rewards.test) == {"brightness", "jpeg_compressibility"}
        assert (run.rewards.test["brightness"] is run.rewards.train["brightness"]) == (scale == 1.0)


def test_item_size(make, tmp_path):
    rows = [{"prompt": "1x2 grid. [LEFT]: a. [RIGHT]: b.", "height": 16, "width": 32}] * 2
    for split in ("train", "test"):
        (tmp_path / f"{split}_metadata.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    for mode, size in (("exact", (32, 16)), ("aspect", (48, 24))):
        run = make(dataset=str(tmp_path), item_size=mode, num_epochs=0)
        Trainer(run).fit()
        with Image.open(run.folder / "eval" / "epoch_0000" / "00000.png") as image:
            assert image.size == size


@pytest.mark.slow
def test_low_precision_recomputes_old_values_where_it_must(make):
    run = one_epoch(make(mixed_precision="bf16", train__old_log_prob="recompute"))
    assert run.state.policy.dtype == torch.bfloat16 and run.state.recompute_old is True
    assert rows_of(run.options, "train")[0]["train/ratio_deviation"] == 0


def test_how_the_old_adapter_follows(make):
    """After one optimizer step: type 0 takes the new weights, type 1 (the default of nft) keeps 0.001 of the old ones."""
    for decay_type in (0, None):
        run = one_epoch(make(train__loss_type="nft", train__decay_type=decay_type))
        new = {name.replace(".default.", ".old."): p for name, p in run.state.parameters.items()}
        old = run.state.snapshots["old"]
        assert all(torch.equal(p, new[name]) for name, p in old.items()) == (decay_type == 0)
        for name, p in old.items():
            torch.testing.assert_close(p, new[name], rtol=0, atol=1e-5)


def test_lora_targets_and_image_positions(make, tiny_folder, tmp_path):
    names = make(train__lora_targets="attn.to_q,attn.to_k").state.parameters
    assert {name.split(".lora_")[0].rpartition("attn.")[2] for name in names} == {"to_q", "to_k"}
    changes = {"pretrained__image_positions": "mrope", "health__probe_images": 0}
    run = build_run(
        tiny_edit_options(
            "toy_qwen_edit", tiny_folder("qwen_image_edit"), tmp_path / "edit", **changes
        )
    )
    assert run.state.policy.card_setup


def test_memory_precision_and_prompt_options(make, tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.txt").write_text(f"a {split} prompt\n")
    for chosen in (False, True):  # True is the default
        run = one_epoch(
            make(enable_mem_log=chosen, allow_tf32=chosen, dataset=tmp_path, prompt_fn="text")
        )
        assert ("memory/peak_rss_mb" in rows_of(run.options, "train")[0]) == chosen
        assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == chosen
        assert [item.prompt for item in (*run.train_items, *run.test_items)] == [
            "a train prompt",
            "a test prompt",
        ]
