"""Options that make a run faster: each has its effect, and the exact ones change no bit."""

import dataclasses
import logging
import re
import threading

import numpy as np
import pytest
import torch
from tiny_run import rows_of, tiny_options, train

from paco_grpo.training.build import USER_ERRORS, build_run
from paco_grpo.training.trainer import Trainer


@pytest.fixture
def make(tiny_flux_dir, tmp_path_factory):
    """Options of a tiny run in a new folder, with changes."""
    return lambda **changes: tiny_options(tiny_flux_dir, tmp_path_factory.mktemp("speed"), **changes)


def weights(run):
    return torch.cat([parameter.detach().flatten() for parameter in run.state.parameters.values()])


def weights_after(config):
    return weights(train(config).run)


def test_exact_options_change_no_bit(make):
    plain = weights_after(make())
    run = build_run(make(speed__offload_vae=True))
    policy = run.state.policy
    policy.offload(text_encoders=True, vae=True)  # as on CUDA
    Trainer(run).fit()
    assert torch.equal(weights(run), plain)
    weight = next(policy.pipeline.vae.parameters())
    home = weight.data_ptr()
    with policy._offloaded_vae.on_device():
        assert weight.data_ptr() != home  # a copy
    assert policy.offloads_text_encoders and weight.data_ptr() == home


def test_compilation_and_attention_are_set(make, caplog):
    with caplog.at_level(logging.INFO):
        run = build_run(make(speed__compile=True, speed__attention="_native_math"))
    assert all(block._compiled_call_impl for block in run.state.policy.transformer.transformer_blocks)
    assert "blocks are compiled" in caplog.text
    blocks = run.state.policy.transformer.transformer_blocks
    assert all(block.attn.processor._attention_backend == "_native_math" for block in blocks)


def test_first_ratio_is_checked_when_blocks_are_compiled(make, caplog):
    """Gradient and no gradient are two compiled graphs, which may differ by rounding also in float32."""
    caplog.set_level(logging.INFO)
    for compiled in (False, True):
        run = build_run(make(num_epochs=1))
        speed = dataclasses.replace(run.options.speed, compile=compiled)
        run.updater.options = dataclasses.replace(run.options, speed=speed)
        Trainer(run).epoch()
        assert run.state.recompute_old is False
        measured = re.findall(r"is off by (\S+) of the limit", caplog.text)
        assert len(measured) == compiled and all(float(deviation) < 0.4 for deviation in measured)


def test_old_log_probs_come_from_the_graph_that_is_trained(make, caplog):
    """A compiled block has one graph for sampling and another one for training: here they differ visibly."""
    caplog.set_level(logging.INFO)
    config = make(num_epochs=1)
    run = build_run(config)
    run.updater.options = dataclasses.replace(run.options, speed=dataclasses.replace(run.options.speed, compile=True))
    velocity = run.state.policy.velocity
    run.state.policy.velocity = lambda *arguments: velocity(*arguments) + 0.1 * torch.is_grad_enabled()
    Trainer(run).epoch()
    assert run.state.recompute_old is True
    assert rows_of(config, "train")[0]["train/ratio_deviation"] < 1e-5


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"speed__attention": "flash3"}, "config.speed.attention='flash3'"),
        ({"max_sequence_length": 600}, "config.max_sequence_length=600.*512"),
    ],
)
def test_refused_before_weights_are_loaded(make, monkeypatch, changes, named):
    monkeypatch.setattr("paco_grpo.training.build.load_generator", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(USER_ERRORS, match=named):
        build_run(make(**changes))


# --- text length ------------------------------------------------------------------------------------------------------


def test_text_length_of_the_data_set(make, tiny_flux_dir, caplog):
    config = make(max_sequence_length=0)
    with caplog.at_level(logging.INFO):
        run = build_run(config)
    # The tiny tokenizer has a token for each character, and one for the end.
    longest = max(len(item.prompt) + 1 for item in [*run.train_items, *run.test_items])
    assert 32 < longest <= 64 and run.options.max_sequence_length == 64
    assert run.state.policy.encode(run.train_items[:1]).prompt_embeds.shape[1] == 64
    assert "64 text tokens for prompts of at most" in caplog.text and "will be truncated" not in caplog.text
    assert "max_sequence_length: 64" in (run.folder / "config.yaml").read_text()
    build_run(make(max_sequence_length=16))
    assert "7 of 7 prompts are longer than config.max_sequence_length=16 tokens" in caplog.text


# --- overlap with rewards ---------------------------------------------------------------------------------------------


def test_work_without_scores_runs_while_the_last_scores_are_awaited(make):
    """The reward of the last batch answers only once old log-probabilities are recomputed and the probe is ready."""
    config = make(num_epochs=1, train__old_log_prob="recompute", health__probe_images=2)
    run = build_run(config)
    ready = threading.Event()
    measured = run.probe.prepare
    run.probe.prepare = lambda: measured() or ready.set()
    awaited = []

    def reward(images, items):
        awaited.append(ready.wait(60))
        return np.arange(len(images), dtype=float)

    run.rewards = dataclasses.replace(run.rewards, train={"brightness": reward})
    Trainer(run).fit()
    assert awaited and all(awaited)
    row = rows_of(config, "train")[0]
    assert 0 <= row["time/reward_overlap_fraction"] <= 1
    assert row["train/ratio_deviation"] == 0


# --- the tail of the rollout ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tail_options_change_images_and_no_ratio(make):
    def first_row(**changes):
        options = make(sample__num_steps=6, num_epochs=1, eval_freq=0, health__probe_images=0, **changes)
        Trainer(build_run(options)).epoch()
        return rows_of(options, "train")[0]

    plain = first_row()
    for changes in ({"sample__tail_steps": 1}, {"sample__tail_order": 2}):
        changed = first_row(**changes)
        assert changed["health/latent_mean"] != plain["health/latent_mean"], changes
        assert changed["train/ratio_deviation"] == plain["train/ratio_deviation"], changes
