"""Options that make a run faster, each with its effect; and what an epoch costs: nothing is
computed twice.
"""

import dataclasses
from collections import Counter

import pytest
import torch
from tiny_run import rows_of, tiny_options, write_prompts

from paco_grpo.training.build import build_run
from paco_grpo.training.trainer import Trainer


@pytest.fixture
def make(tiny_flux_dir, tmp_path_factory):
    return lambda **changes: tiny_options(
        tiny_flux_dir, tmp_path_factory.mktemp("speed"), **changes
    )


def test_compilation_attention_and_offloading_are_set(make):
    torch.backends.cuda.enable_cudnn_sdp(True)
    run = build_run(
        make(speed__compile=True, speed__attention="_native_math", speed__offload_text=True)
    )
    assert run.state.policy.offloads_text_encoders
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    for block in run.state.policy.transformer.transformer_blocks:
        assert (
            block._compiled_call_impl and block.attn.processor._attention_backend == "_native_math"
        )


def test_old_log_probs_come_from_the_graph_that_is_trained(make):
    """A compiled block has one graph for sampling and another one for training: here they differ
    visibly.
    """
    config = make(num_epochs=1)
    run = build_run(config)
    run.updater.options = dataclasses.replace(
        run.options, speed=dataclasses.replace(run.options.speed, compile=True)
    )
    velocity = run.state.policy.velocity
    run.state.policy.velocity = lambda *arguments, **size: (
        velocity(*arguments, **size) + 0.1 * torch.is_grad_enabled()
    )
    Trainer(run).epoch()
    assert run.state.must_recompute is True
    assert rows_of(config, "train")[0]["train/ratio_deviation"] < 1e-5


def test_text_length_of_the_data_set(make, caplog):
    run = build_run(make(max_sequence_length=0))
    assert run.options.max_sequence_length == 64
    for part in (run.sampler, run.updater, run.checkpoints):
        assert part.options is run.options
    assert run.state.policy.encode(run.train_items[:1]).prompt_embeds.shape[1] == 64
    assert "truncated" not in caplog.text
    run = build_run(make(max_sequence_length=16, train__max_sequence_length=0))
    assert "7 of 7 prompts" in caplog.text and "max_sequence_length=16" in caplog.text
    assert run.options.train.max_sequence_length == 16  # not more than the evaluation takes


def test_training_takes_shorter_texts_than_the_evaluation(make):
    config = make(
        max_sequence_length=96,
        train__max_sequence_length=0,
        num_epochs=1,
        sample__noise_steps="0,1",
    )
    run = build_run(config)
    trainer = Trainer(run)
    lengths = set()
    run.state.policy.pipeline.text_encoder_2.register_forward_pre_hook(
        lambda _, arguments: lengths.add(arguments[0].shape[1])
    )
    trainer.epoch()
    assert lengths == {64}  # of the health probe, too
    assert rows_of(config, "train")[0]["train/ratio_deviation"] < 1e-5
    lengths.clear()
    trainer.evaluations.evaluate_if_due(finished=True)
    assert lengths == {96}


def test_an_epoch_computes_each_thing_once(make, tmp_path):
    """64 images of 8 prompts, 10 steps, PPO; the published code: 832 images through the
    transformer, 256 texts, 128 decodes.
    """
    run = build_run(
        make(
            dataset=write_prompts(tmp_path, train=8),
            sample__num_steps=10,
            sample__unique_sample_num_per_epoch=8,
            sample__num_images_per_prompt=8,
            sample__batch_size=16,
            train__batch_size=16,
            train__resolution=8,
            train__beta=0,
            health__probe_images=2,
        )
    )
    pipeline = run.state.policy.pipeline
    counted = Counter()
    trainer = Trainer(run)

    def forward(module, arguments, keywords, output):
        images = len(keywords["hidden_states"])
        counted["transformer"] += images
        if output[0].requires_grad:
            output[0].register_hook(lambda gradient: counted.update(backward=images))

    run.state.policy.transformer.register_forward_hook(forward, with_kwargs=True)
    for name, module in (
        ("clip", pipeline.text_encoder),
        ("t5", pipeline.text_encoder_2),
        ("vae", pipeline.vae.decoder),
    ):
        module.register_forward_hook(
            lambda _, arguments, output, name=name: counted.update({name: len(arguments[0])})
        )
    run.probe.measure()
    counted.clear()
    trainer.epoch()
    # The health probe needs one forward for each of its images; the base's velocities were kept.
    assert counted == {"transformer": 704 + 2, "backward": 64, "clip": 8, "t5": 8, "vae": 64}
