"""Every option of the toy path does what it says: turn it, and see the change."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_run import rows_of, tiny_config

from paco_grpo.data.sampler import GroupSampler
from paco_grpo.training.collect import collect
from paco_grpo.training.evaluation import draw
from paco_grpo.training.scoring import ScoringQueue
from paco_grpo.training.setup import build_run
from paco_grpo.training.trainer import Trainer


@pytest.fixture(scope="module")
def make(tiny_flux_dir, tmp_path_factory):
    """A run that is built but not started, by changed options."""

    def build(**changes):
        return build_run(tiny_config(tiny_flux_dir, tmp_path_factory.mktemp("options"), **changes))

    return build


def epoch(run, **changes):
    """Roll out one epoch of ``run``; returns local samples by global position."""
    samples = GroupSampler(len(run.train_items), run.plan.prompts, run.plan.images_per_prompt, run.config.seed).samples(
        0
    )
    positions = samples.positions_of(0, 1)
    arguments = {
        "batch_size": run.plan.sample_batch_size, "num_steps": 3, "noise_steps": (1,), "noise_level": 0.7, "cps": False,
        "same_latent": False, "merge_lora": False, "on_images": lambda images: None,
        "stop_after_batch": lambda: False, "resolution": 16, "item_size": "aspect",
    } | changes  # fmt: skip
    queue = ScoringQueue(run.train_rewards)
    rollouts = collect(run.policy, run.train_items, samples, positions, queue, **arguments)
    scores = queue.results(len(positions))
    numbers = np.concatenate(rollouts.samples)
    latents = torch.cat([record.clean_latents for record in rollouts.records])[np.argsort(numbers)]
    return samples, rollouts, latents, scores


def test_sampling_does_not_depend_on_the_batch(make):
    run = make()
    _, _, four, scores_four = epoch(run, batch_size=4)
    _, _, three, scores_three = epoch(run, batch_size=3)
    torch.testing.assert_close(four, three, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(scores_four, scores_three, atol=0.5)


def test_sampling_options_change_the_samples(make):
    run = make()
    _, _, base, _ = epoch(run)
    for changes in (
        {"noise_level": 0.9},
        {"cps": True},
        {"noise_steps": (0,)},
        {"num_steps": 4},
        {"same_latent": True},
    ):
        assert not torch.allclose(base, epoch(run, **changes)[2], atol=1e-4), changes


def test_same_latent_shares_what_comes_before_the_noise(make):
    samples, rollouts, _, _ = epoch(make(), same_latent=True, batch_size=3)
    before = torch.cat([record.latents[:, 0] for record in rollouts.records])[
        np.argsort(np.concatenate(rollouts.samples))
    ]
    for item in np.unique(samples.item_ids):
        group = before[samples.item_ids == item]
        torch.testing.assert_close(group, group[:1].expand_as(group), rtol=1e-4, atol=1e-5)
    after = torch.cat([record.next_latents[:, 0] for record in rollouts.records])
    assert len(torch.unique(after.flatten(1), dim=0)) == len(after)


def test_micro_batches_are_the_samples_asked_for(make):
    _, rollouts, latents, _ = epoch(make(), batch_size=3)
    wanted = [6, 1, 4, 3, 0]
    got = list(rollouts.micro_batches(wanted, 2))
    assert [numbers.tolist() for numbers, _ in got] == [[6, 1], [4, 3], [0]]
    for numbers, record in got:
        assert torch.equal(record.clean_latents, latents[numbers])
        assert len(record.conditioning) == len(numbers)
        row = rollouts.conditioning.select(torch.unique(record.item_ids, return_inverse=True)[1])
        assert type(record.conditioning) is type(row)


def gradients(run, train_batch_size):
    """Gradient of one epoch's loss, with fixed advantages."""
    samples, rollouts, _, _ = epoch(run)
    run.config.train.batch_size = train_batch_size
    updater = run.updater
    kept, advantages = np.ones(len(samples.item_ids), bool), np.linspace(-1, 1, len(samples.item_ids))
    kept[2] = False
    sums: dict = {}
    wanted = [i for i in range(len(kept)) if kept[i]]
    for numbers, record in rollouts.micro_batches(wanted, train_batch_size):
        assert not updater._backward(updater._with_advantages(record, advantages[numbers]), kept.sum(), sums)
    result = {name: p.grad.clone() for name, p in run.parameters.items()}
    updater.optimizer.zero_grad(set_to_none=True)
    return result


def test_gradient_does_not_depend_on_the_micro_batch(make):
    run = make()
    whole, single = gradients(run, 100), gradients(run, 1)
    scale = max(g.abs().max() for g in whole.values())
    for name in whole:
        torch.testing.assert_close(whole[name], single[name], rtol=1e-3, atol=1e-5 * float(scale))


def weights_after(make, **changes):
    run = make(num_epochs=1, save_freq=0, **changes)
    Trainer(run).train()
    return torch.cat([p.detach().flatten() for p in run.parameters.values()]), run


@pytest.fixture(scope="module")
def plain(make):
    return weights_after(make)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"train__learning_rate": 1e-4},
        {"train__lr_warmup_steps": 10},
        {"train__adam_weight_decay": 5.0},
        {"train__adam_epsilon": 0.1},
        {"train__max_grad_norm": 1e-9, "train__adam_epsilon": 1e-4},
        {"train__num_inner_epochs": 2},
        {"train__gradient_step_per_epoch": 2},
        {"train__resolution": 24},
        {"train__rank_grpo": True},
        {"train__adv_clip_max": 0.1, "train__adam_epsilon": 0.1},
        {"sample__noise_steps": "0,1"},
        {"sample__noise_steps": "0,1", "sample__num_noise_steps": 1},
        {"sample__noise_steps": "0,1", "train__timesteps": "0"},
        {"sample__noise_level": 0.3},
        {"sample__cps": True},
        {"sample__same_latent": True},
        {"sample__guidance_scale": 1.0},
        {"sample__global_std": True, "train__adam_epsilon": 0.1},
        {"sample__num_images_per_prompt": 8},
        {"sample__unique_sample_num_per_epoch": 4},
        {"sample__num_steps": 4},
        {"per_prompt_stat_tracking": False},
        {"max_sequence_length": 8},
        {"train__loss_type": "guard_grpo"},
        {"train__loss_type": "nft"},
        {"train__reward_fn_kwargs": "{'tiny_run:brightness': {'scale': -1.0}}"},
        {"train__aggregate_fn": "tiny_run:reversed_aggregate"},
    ],
    ids=lambda changes: ",".join(f"{k}={v}" for k, v in changes.items()),
)
@pytest.mark.slow
def test_option_changes_the_update(make, plain, changes):
    weights, _ = weights_after(make, **changes)
    assert torch.isfinite(weights).all()
    reference = plain[0]
    if "train__adam_epsilon" in changes and len(changes) > 1:  # the plain run with the same epsilon
        reference = weights_after(make, train__adam_epsilon=changes["train__adam_epsilon"])[0]
    assert not torch.equal(weights, reference)


def test_rerun_is_bit_identical(make, plain):
    assert torch.equal(weights_after(make)[0], plain[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"train__batch_size": 8},
        {"enable_gradient_checkpointing": True},
        {"sample__reward_batch_size": 1},
        {"train__ema": False},
    ],
    ids=str,
)
def test_option_that_must_not_change_the_update(make, changes):
    reference = weights_after(make, train__adam_epsilon=1.0)[0]
    weights, _ = weights_after(make, train__adam_epsilon=1.0, **changes)
    torch.testing.assert_close(weights, reference, rtol=0, atol=1e-7)


def test_kl_term_uses_the_reference_only_when_it_counts(make, monkeypatch):
    calls = []
    run = make(num_epochs=2, save_freq=0, train__beta=0.5, health__probe_images=0)
    reference = run.policy.reference
    monkeypatch.setattr(run.policy, "reference", lambda: calls.append(1) or reference())
    Trainer(run).train()
    assert calls
    assert "train/kl" in rows_of(run.config, "train")[1]
    calls.clear()
    run = make(num_epochs=1, save_freq=0, health__probe_images=0)
    monkeypatch.setattr(run.policy, "reference", lambda: calls.append(1))
    Trainer(run).train()
    assert not calls


def test_lora_size_and_start(make, plain, tmp_path):
    _, run = plain
    sizes = {name: p.shape for name, p in run.parameters.items()}
    assert {min(shape) for shape in sizes.values()} == {8}
    other = make(train__lora_rank=2, train__lora_alpha=6)
    assert {min(p.shape) for p in other.parameters.values()} == {2}
    assert other.policy.transformer.peft_config["default"].lora_alpha == 6
    adapter = Path(run.folder) / "checkpoints" / "epoch_0001" / "adapter"
    started = make(train__lora_path=str(adapter))
    assert all(torch.equal(p, run.ema.shadow[name]) for name, p in started.parameters.items())


def test_full_training_without_lora(make):
    _, run = weights_after(make, use_lora=False, train__learning_rate=1e-4)
    assert all("lora" not in name for name in run.parameters)
    assert (run.folder / "checkpoints" / "epoch_0001" / "transformer").is_dir()


def test_ema_options(make):
    _, run = weights_after(make, train__gradient_step_per_epoch=2, train__ema_decay=0.0)
    assert all(torch.equal(p, run.ema.shadow[n]) for n, p in run.parameters.items())
    _, run = weights_after(make, train__gradient_step_per_epoch=2, train__ema_update_interval=3)
    assert any(not torch.equal(p, run.ema.shadow[n]) for n, p in run.parameters.items())
    assert make(train__ema=False).ema is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"test__num_steps": 3}, True),
        ({"test__seed": 5}, True),
        ({"test__resolution": 40}, True),
        ({"test__batch_size": 1}, False),
    ],
    ids=str,
)
def test_evaluation_options(make, changes, said):
    one = make(num_epochs=0)
    Trainer(one).train()
    two = make(num_epochs=0, **changes)
    Trainer(two).train()
    pixels = [(run.folder / "eval" / "epoch_0000" / "00003.png").read_bytes() for run in (one, two)]
    scores = [rows_of(run.config, "eval")[0]["eval/brightness_mean"] for run in (one, two)]
    if said:
        assert pixels[0] != pixels[1]
    else:
        assert scores[0] == pytest.approx(scores[1], abs=0.1)


def test_evaluation_images_need_not_be_kept(make):
    run = make(num_epochs=0, test__save_eval_images=False, test__num_images=2)
    Trainer(run).train()
    folder = run.folder / "eval" / "epoch_0000"
    assert sorted(path.name for path in folder.iterdir()) == ["categories.md", "eval_data.jsonl", "sheet.png"]
    assert [json.loads(line)["file"] for line in (folder / "eval_data.jsonl").read_text().splitlines()] == [None, None]


def test_test_rewards_may_differ(make):
    run = make(
        num_epochs=0,
        train__reward_fn_kwargs="{'tiny_run:brightness': {'scale': 2.0}}",
        test__reward_fn="{'tiny_run:brightness': 1, 'jpeg_compressibility': 1}",
        test__reward_fn_kwargs="{'tiny_run:brightness': {'scale': 5.0}}",
    )
    assert set(run.test_rewards) == {"brightness", "jpeg_compressibility"}
    assert run.test_rewards["brightness"] is not run.train_rewards["brightness"]
    same = make(test__reward_fn="{'tiny_run:brightness': 1, 'jpeg_compressibility': 1}")
    assert same.test_rewards["brightness"] is same.train_rewards["brightness"]


def test_evaluation_is_plain_euler_from_the_seed(make):
    run = make()
    items = run.test_items[:2]
    alone = draw(run.policy, items[1:], [9], 16, 16, 2)[0]
    together = draw(run.policy, items, [8, 9], 16, 16, 2)[1]
    assert np.abs(np.asarray(alone, int) - np.asarray(together, int)).max() <= 1


def test_item_size(make, tmp_path):
    rows = [{"prompt": "1x2 grid. [LEFT]: a. [RIGHT]: b.", "height": 16, "width": 32}] * 2
    for split in ("train", "test"):
        (tmp_path / f"{split}_metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    from PIL import Image

    for mode, size in (("exact", (32, 16)), ("aspect", (48, 24))):
        run = make(dataset=str(tmp_path), item_size=mode, num_epochs=0)
        Trainer(run).train()
        with Image.open(run.folder / "eval" / "epoch_0000" / "00000.png") as image:
            assert image.size == size


def test_memory_and_thread_options(make):
    _, run = weights_after(make, enable_mem_log=True)
    assert rows_of(run.config, "train")[0]["memory/peak_rss_mb"] > 0
    assert json.loads((run.folder / "plan.json").read_text())["threads_per_process"] == 1


@pytest.mark.slow
def test_low_precision_recomputes_old_values_where_it_must(make):
    """bf16 on the CPU: the training batch differs from the sampling batch, so 'auto' measures and decides."""
    _, run = weights_after(make, mixed_precision="bf16", train__clip_range=1e-12)
    assert run.updater.recompute in (True, False)
    _, run = weights_after(make, mixed_precision="bf16", train__old_log_prob="recompute")
    assert run.updater.recompute is True
    assert rows_of(run.config, "train")[0]["train/ratio_deviation"] == 0
