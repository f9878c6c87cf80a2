"""scripts/estimate.py: closed forms of FLOPs and memory on tiny models, and the command."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from named import load
from tiny_run import ROOT, load_script, write_prompts
from torch import nn
from transformers import AutoTokenizer

from paco_grpo import architectures
from paco_grpo.architectures import pipeline_of
from paco_grpo.distributed import blocks_of
from paco_grpo.estimate import fake_device, generator, judge
from paco_grpo.estimate.fake_device import FakeDevice, fake_cpu, measured
from paco_grpo.estimate.judge import JudgePart
from paco_grpo.estimate.report import num_evaluations
from paco_grpo.policies import PolicySettings, load_policy
from paco_grpo.policies.memory import quantizable

GIB = 2**30


def run_on_fake(module, function, shape):
    """What ``function(module, x)`` counts."""
    device = FakeDevice()
    fake_device.place(module, device, "cpu")
    with device.mode:
        x = torch.empty(shape)
    with fake_cpu(device):
        return measured(device, lambda: function(module, x))


def test_flops_and_peak_of_a_linear_layer_and_of_attention():
    """A product of (m, k) and (k, n) is 2·m·k·n. Forward and backward have one each, because the
    input's gradient is not needed.
    """
    with torch.device("meta"):
        layer = nn.Linear(512, 256, bias=False)
    counted = run_on_fake(layer, lambda m, x: m(x).sum().backward(), (64, 512))
    assert counted.flops == 2 * 2 * 64 * 512 * 256
    # The gradient of the weights; two scalars take 512 bytes each.
    assert counted.peak == 4 * 512 * 256 + 2 * 512

    attention = nn.functional.scaled_dot_product_attention
    counted = run_on_fake(layer, lambda _, x: attention(x, x, x), (2, 3, 128, 64))
    assert counted.flops == 2 * 2 * 2 * 3 * 128 * 128 * 64  # both products of all heads


@pytest.mark.parametrize(
    ("model", "billions", "rounding"),
    [
        ("black-forest-labs/FLUX.1-dev", 11.90, 0.005),
        ("Qwen/Qwen-Image", 20.43, 0.005),
        ("black-forest-labs/FLUX.2-dev", 32.2, 0.005),
        ("stabilityai/stable-diffusion-3.5-large", 8.06, 0.005),
        ("Tongyi-MAI/Z-Image", 6.15, 0.005),
        # Rounded by their authors.
        ("Qwen/Qwen-Image-2.1", 7, 0.05),
        ("krea/Krea-2-Raw", 12.9, 0.05),
        ("meituan-longcat/LongCat-Image", 6, 0.05),
    ],
)
def test_models_have_the_published_number_of_parameters(model, billions, rounding):
    module = pipeline_of(model, torch.bfloat16).transformer
    total = sum(parameter.numel() for parameter in module.parameters())
    assert total / 1e9 == pytest.approx(billions, rel=rounding)


def test_random_weights_become_a_policy(tmp_path, monkeypatch):
    """benchmarks/epoch.py --random_weights, here without memory."""
    monkeypatch.setattr(architectures, "PartialState", lambda: SimpleNamespace(device="meta"))
    folder = architectures.write("Tongyi-MAI/Z-Image", tmp_path)
    with architectures.random_weights("Tongyi-MAI/Z-Image"):
        assert type(load_policy(folder, PolicySettings(device="meta"))).__name__ == "ZImagePolicy"


def tiny(folder, name="t2is", **changes):
    options = {
        "pretrained.model": str(folder),
        "max_sequence_length": "24",
        "train.lora_rank": "4",
        "train.resolution": "64",
        "test.resolution": "64",
    }
    options |= {key.replace("__", "."): value for key, value in changes.items()}
    return load(name, *options.items())


@pytest.fixture(scope="module")
def tiny_flux(tiny_flux_dir):
    """What is estimated for it on eight GPUs."""
    return generator.estimate(tiny(tiny_flux_dir), "tiny", 8, 80 * GIB)


def test_an_epoch_of_a_tiny_flux(tiny_flux):
    flops = tiny_flux.epoch
    assert list(flops) == ["encode", "denoise", "decode", "train"]
    assert tiny_flux.evaluation is None  # its prompts are not there
    # 84 images are denoised in 10 steps and trained in one. Weights are frozen: the backward pass
    # computes the gradients of inputs and of the adapter.
    assert 1.9 < 10 * flops["train"] / flops["denoise"] < 2.6
    adapter = tiny_flux.resident["adapter"]
    assert tiny_flux.resident["optimizer"] == 2 * adapter
    assert tiny_flux.adds["train"]["gradients"] == adapter
    assert tiny_flux.adds["update"]["gradients in one message"] == adapter
    assert tiny_flux.adds["evaluate"]["trained weights set aside"] == adapter
    assert tiny_flux.resident["OpenCLIP ViT-H-14"] == 4 * 986_109_441


@pytest.mark.parametrize(("longest", "expected"), [("96", 96), ("0", 64)])
def test_the_length_of_texts_is_that_of_the_longest_prompt(
    tiny_flux_dir, tmp_path, longest, expected
):
    dataset = str(write_prompts(tmp_path, train=1, test=2))
    options = tiny(tiny_flux_dir, "t2is_fast", dataset=dataset, max_sequence_length=longest)
    policy = generator.build_policy(options, FakeDevice(), "cpu")
    assert policy.max_sequence_length == expected
    assert generator.text_lengths(policy, options) == (expected, 64)


TEXTS = (
    "2x2 grid of a medieval alchemist, hand-drawn. [TOP-LEFT]: He gazes at a glowing potion.",
    "A storybook about an otter who can't swim; 3 panels, soft watercolors, visible brush strokes.",
)


def test_texts_have_about_the_tokens_of_the_real_tokenizer(qwen_tokenizer):
    """In English."""
    real = AutoTokenizer.from_pretrained(qwen_tokenizer)
    ours = pipeline_of("Qwen/Qwen-Image", torch.bfloat16).tokenizer
    for text in TEXTS:
        counts = [len(tokenizer(text).input_ids) for tokenizer in (ours, real)]
        assert counts[0] == pytest.approx(counts[1], rel=0.15)


def test_options_change_the_memory_that_they_should(tiny_flux_dir, tiny_flux):
    options = tiny(
        tiny_flux_dir,
        enable_gradient_checkpointing="true",
        pretrained__quantize="nf4",
        train__ema="false",
        speed__offload_vae="true",
        sample__batch_size="2",
        train__use_8bit_adam="true",
        train__max_sequence_length="4",
        test__reward_fn_kwargs='{"subfig_clipT": {"dtype": "float16"}, "clipscore": {"server": "x"}}',
    )
    # Text encoders leave a GPU of which less than half is free: CUDA itself and the rewards take 11
    # GiB. One of them is in another precision in evaluations than in training.
    changed = generator.estimate(options, "tiny", 8, 12 * GIB)
    assert changed.adds["train"]["activations"] < 0.7 * tiny_flux.adds["train"]["activations"]
    # 24 tokens a text become 4 beside the 64 of an image; attention is quadratic in the sum.
    assert (68 / 88) ** 2 < changed.epoch["denoise"] / tiny_flux.epoch["denoise"] < 68 / 88
    layers = quantizable(pipeline_of(str(tiny_flux_dir), torch.bfloat16).transformer)
    saved = sum(layer.weight.numel() for _, layer in layers) * (2 - 1 / 2 - 1 / 64 - 1 / 4096)
    expected = tiny_flux.resident["transformer"] - saved
    assert changed.resident["transformer"] == pytest.approx(expected, rel=1e-3)
    assert "average" not in changed.resident and "VAE" not in changed.resident
    assert "text encoders" in tiny_flux.resident and "text encoders" not in changed.resident
    assert changed.resident["OpenCLIP ViT-H-14"] == (4 + 2) * 986_109_441
    assert "CLIP ViT-L/14" in tiny_flux.resident and "CLIP ViT-L/14" not in changed.resident
    assert changed.resident["optimizer"] == tiny_flux.resident["optimizer"] // 4


def test_weights_are_sharded_inside_a_machine_of_eight(tiny_flux_dir):
    """Not the adapter. A block comes in a message; if it is trained, its gradients go in another."""
    options = tiny(tiny_flux_dir, train__sharding="fsdp2")
    policy = generator.build_policy(options, FakeDevice(), "cpu")
    whole, _, _ = generator.weight_bytes(options, policy, 1, 80 * GIB)
    for processes, shards in ((4, 4), (16, 8)):
        part, _, _ = generator.weight_bytes(options, policy, processes, 80 * GIB)
        assert part == whole | {"transformer": whole["transformer"] // shards}
    block = max(map(generator.base_bytes, blocks_of(policy.transformer)))
    frozen = generator.bytes_to_compute(options, policy, 4)
    trained = generator.bytes_to_compute(dataclasses.replace(options, use_lora=False), policy, 4)
    assert trained == frozen + block and 2 * block < frozen < whole["transformer"] + 2 * block
    assert generator.bytes_to_compute(options, policy, 1) == 0


def test_an_objective_that_keeps_and_compares(tiny_flux_dir, tiny_flux):
    """dpo trains 2 of 4 images, here twice; its first pass has two forwards and keeps the velocities
    of one, for the images of an optimizer step.
    """
    changes = {"sample__num_images_per_prompt": "4", "train__num_sigmas": "3"}
    found = {}
    for name, passes in (("nft", 1), ("dpo", 2)):
        changes |= {"train__num_inner_epochs": str(passes), "train__gradient_step_per_epoch": "3"}
        options = tiny(tiny_flux_dir, train__loss_type=name, **changes)
        found[name] = generator.estimate(options, name, 1, 80 * GIB)
    per_image = {name: found[name].epoch["train"] for name in found}
    # nft: the old velocity, a forward and a backward with gradients of inputs (about two forwards).
    assert per_image["dpo"] == pytest.approx(2 * per_image["nft"] / 2 * 5 / 4, rel=0.1)
    images = 4 * 42 // 2 // 3
    side = found["dpo"].adds["train"]["records"] - found["nft"].adds["train"]["records"]
    tokens = (64 // 16) ** 2
    assert side == 3 * images * tokens * 64 * 4  # the reference's velocities at three σ
    assert found["nft"].adds["update"]["gradients in one message"] == 0  # of a single process


@pytest.fixture
def command(tiny_flux_dir, tiny_flux, monkeypatch):
    """``estimate.py``, and what it gets as the estimate: the tiny FLUX's memory, other work."""
    work = {"denoise": 3.1e17, "train": 0.9e17}
    flux = dataclasses.replace(
        tiny_flux, epoch=work, evaluation=2.2e17, resident=dict(tiny_flux.resident)
    )
    monkeypatch.setattr(generator, "estimate", lambda *_: flux)
    part = JudgePart(["its line"], 900.0, gpus=2, beside={"judge": 5 * GIB})
    monkeypatch.setattr(judge, "judge_part", lambda *_: part)
    config = ["--config", f"{ROOT}/config/grpo.py:t2is"]
    config.append(f"--config.pretrained.model={tiny_flux_dir}")

    def run(*words):
        return load_script("estimate").main([*config, *words])

    return run, flux


@pytest.mark.parametrize(
    ("words", "teraflops"),
    [
        (("--share", "0.5"), 0.5 * 989),
        ((), 182),  # an H100 waits for the host
        (("--gpu", "rtx4090"), 0.42 * 165),
        (("--gpu", "RTX 4090", "--config.speed.compile=true"), 0.42 * 165),
        (("--gpu", "a100 80", "--config.speed.compile=true"), 0.42 * 312),
    ],
)
def test_the_command_tells_seconds_of_an_epoch_and_hours_of_a_run(
    command, words, teraflops, capsys
):
    run, flux = command
    assert run("--processes", "3", *words) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = (line.split() for line in lines if line.startswith("an epoch"))
    seconds = sum(flux.epoch.values()) / (1e12 * teraflops)
    assert [float(word) for word in row[-2:]] == [400_000, pytest.approx(seconds, abs=0.06)]
    (row,) = (line.split() for line in lines if line.startswith("evaluation"))
    assert row[-2:] == ["220000", f"{220_000 / teraflops:.1f}"]
    assert "its line" in lines
    hours = (seconds + 900) / 3600
    (toy,) = (line for line in lines if line.startswith("16 epochs"))
    # One before training, at 10 and at the end.
    whole = 16 * hours + 3 * 220_000 / teraflops / 3600
    assert f" 3 evaluations: {whole:.1f} hours, {5 * whole:.1f} GPU-hours" in toy
    (published,) = (line for line in lines if line.startswith("6 hours"))
    assert f": {6 / hours:.0f} epochs, 30 GPU-hours" in published


def test_the_command_sets_its_status(command, capsys):
    run, flux = command
    assert run() == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("fits")
    free = 23.5 * GIB - generator.RESERVE - max(flux.peaks.values())
    flux.resident["more"] = int(free) - 6 * GIB
    assert run("--gpu", "rtx4090") == 0
    flux.resident["more"] = int(free) - 4 * GIB  # less than the judge needs beside it
    assert run("--gpu", "rtx4090") == 3
    assert capsys.readouterr().out.splitlines()[-1] == "lower the batch sizes or resolutions"
    with pytest.raises(SystemExit, match="2"):
        run("--gpu", "A100")  # two of them
    assert "A100 80GB or A100 40GB" in capsys.readouterr().err
    assert run("--judge_gpus", "0", "--processes", "2") == 1


@pytest.mark.parametrize(("frequency", "count"), [(0, 1), (5, 5), (8, 3), (10, 3), (30, 2)])
def test_a_run_ends_with_an_evaluation(frequency, count):
    assert num_evaluations(frequency) == count


def test_an_evaluation_of_a_tiny_flux(tiny_flux_dir, tmp_path):
    """7 of 9 prompts in 14 steps on two GPUs, beside an epoch's 8 images of 10 steps on each."""
    options = tiny(
        tiny_flux_dir,
        dataset=str(write_prompts(tmp_path, train=3, test=9)),
        test__num_images="7",
        test__num_steps="14",
        sample__unique_sample_num_per_epoch="2",
        sample__num_images_per_prompt="8",
    )
    estimated = generator.estimate(options, "tiny", 2, 80 * GIB)
    epoch = estimated.epoch
    expected = 4 / 8 * (14 / 10 * epoch["denoise"] + epoch["decode"]) + 7 / 4 * epoch["encode"]
    assert estimated.evaluation == pytest.approx(expected, rel=1e-6)
