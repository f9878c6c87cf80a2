"""What an epoch costs, counted in images on a real pipeline: nothing is computed twice, and rewards overlap sampling."""

import dataclasses
import threading
from collections import Counter

import numpy as np
import pytest
from tiny_run import tiny_options, write_prompts

from paco_grpo.training.build import build_run
from paco_grpo.training.trainer import Trainer

IMAGES, PROMPTS, STEPS = 64, 8, 10
# The published implementation on the same epoch: 640 sampling + 192 training, 256 an encoder, 128, 64.


@pytest.fixture
def build(tiny_flux_dir, tmp_path):
    """64 images of 8 prompts, 10 steps, one of them noisy, PPO without KL."""
    write_prompts(tmp_path / "prompts", train=PROMPTS)

    epoch = {
        "sample__num_steps": STEPS, "sample__unique_sample_num_per_epoch": PROMPTS,
        "sample__num_images_per_prompt": IMAGES // PROMPTS, "sample__batch_size": 16, "train__batch_size": 16,
        "train__resolution": 8, "train__beta": 0, "health__probe_images": 0,
    }  # fmt: skip
    return lambda **changes: build_run(tiny_options(tiny_flux_dir, tmp_path, **epoch | changes))


def count(run) -> Counter:
    """Images through each part of the policy of ``run``, counted from now on."""
    pipeline, counted = run.state.policy.pipeline, Counter()

    def forward(module, arguments, keywords, output):
        images = len(keywords["hidden_states"])
        counted["transformer"] += images
        if output[0].requires_grad:
            output[0].register_hook(lambda gradient: counted.update(backward=images))

    def rows(name):
        return lambda module, arguments, output: counted.update({name: len(arguments[0])})

    run.state.policy.transformer.register_forward_hook(forward, with_kwargs=True)
    pipeline.text_encoder.register_forward_hook(rows("clip"))
    pipeline.text_encoder_2.register_forward_hook(rows("t5"))
    pipeline.vae.decoder.register_forward_hook(rows("vae"))
    return counted


def test_an_epoch_computes_each_thing_once(build):
    run = build()
    counted = count(run)
    Trainer(run).epoch()
    assert counted == {"transformer": 704, "backward": 64, "clip": 8, "t5": 8, "vae": 64}


def test_the_probe_costs_one_forward_per_image(build):
    run = build(health__probe_images=2, sample__num_steps=3)
    counted, trainer = count(run), Trainer(run)
    trainer.epoch()
    first = counted["transformer"]
    trainer.epoch()
    assert counted["transformer"] - first == 64 * 4 + 2
    assert first == 64 * 4 + 2 + 2 * 2  # once, its way to the noise step on the base model
    assert counted["vae"] == 2 * 64


def test_shared_steps_are_computed_once_per_group(build):
    run = build(sample__same_latent=True)
    counted = count(run)
    Trainer(run).epoch()
    # step 0 once for each prompt of a batch of 16 images: at most 8 images in each of the 4 batches
    assert counted["transformer"] <= 704 - 64 + 4 * PROMPTS
    assert counted["backward"] == 64


def test_rewards_run_while_sampling_continues(build):
    run = build()
    counted, all_decoded, begun_early = count(run), threading.Event(), []

    def decoded(module, arguments, output):
        if counted["vae"] == IMAGES:
            all_decoded.set()

    def reward(images, items):
        begun_early.append(not all_decoded.is_set())
        assert all_decoded.wait(60), "sampling waits for rewards"
        return np.arange(len(images), dtype=float)

    run.state.policy.pipeline.vae.decoder.register_forward_hook(decoded)
    run.rewards = dataclasses.replace(run.rewards, train={"brightness": reward})
    Trainer(run).epoch()
    assert begun_early[0] and not any(begun_early[1:])
