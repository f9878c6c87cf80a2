"""What a wrong policy would train is refused before a run, with the number."""

import dataclasses
import re
from unittest import mock

import pytest
import torch
from tiny_policies import FAMILIES, items, load

from paco_grpo.policies import PolicySettings
from paco_grpo.policies.base import PolicyLoadError
from paco_grpo.policies.generic import generic_policy
from paco_grpo.policies.proof import prove

SIZES = [(32, 64), (64, 32)]


def load_generic(name, dtype=torch.float32):
    family = FAMILIES[name]
    options = {"max_sequence_length": 48, "dtype": dtype}
    if "negative_prompt" in family.options:
        options["negative_prompt"] = "dull, and in the dark"
    pipeline = family.build()
    for parameter_name, weight in pipeline.transformer.named_parameters():
        # So that a lost text or reference changes the image of random weights by more than rounding
        # does on any processor.
        if parameter_name.endswith("to_v.weight"):
            weight.data.mul_(3)
    return generic_policy(type(pipeline))(pipeline, PolicySettings(**family.options | options))


def item_of(name):
    (item,) = items(name, "a blue star", size=(64, 96))
    return item


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["flux_kontext", "qwen_image", "z_image", "stable_diffusion_3"])
def test_rounding_passes(name, dtype):
    """In bfloat16, too, both ways have the same bits but for a shared forward."""
    proof = prove(load_generic(name, dtype), item_of(name), SIZES, 3)
    assert [(one.height, one.width) for one in proof.differences] == SIZES
    for difference in proof.differences:
        assert difference.mean <= difference.largest <= proof.largest <= 1
        assert difference.share_near == 1
    assert proof.shared_error < (1e-5 if dtype == torch.float32 else 0.02)


def test_a_native_policy_differs_by_rounding(tiny_folder):
    """It computes more of the image in float32."""
    policy = load("flux", tiny_folder("flux"), dtype=torch.bfloat16)
    proof = prove(policy, item_of("flux"), SIZES, 3)
    assert 0 < proof.differences[1].mean < 0.8


def another_prompt(policy, monkeypatch):
    encode = policy.encode

    def encode_another(chosen, *args):
        return encode([dataclasses.replace(one, prompt="two red cars") for one in chosen], *args)

    monkeypatch.setattr(policy, "encode", encode_another)


def next_sigma(policy, monkeypatch):
    velocity = policy.velocity

    def late(latents, sigma, conditioning, height, width):
        schedule = policy.sigmas(3, height, width).tolist()
        later = schedule[1:-1] + schedule[-2:-1]
        following = dict(zip(schedule[:-1], later, strict=True))
        return velocity(
            latents,
            torch.tensor([following.get(value, value) for value in sigma.tolist()]),
            conditioning,
            height,
            width,
        )

    monkeypatch.setattr(policy, "velocity", late)


def lost_negative(policy, monkeypatch):
    velocity = policy.velocity
    monkeypatch.setattr(policy, "velocity", lambda *args: velocity(*args, guided=False))


def another_negative(policy, monkeypatch):
    velocity = policy.velocity

    def with_empty_text(*args):
        with monkeypatch.context() as patched:
            patched.setattr(policy, "negative_prompt", "")
            return velocity(*args)

    encode = policy.encode

    def encode_empty(*args):
        with monkeypatch.context() as patched:
            patched.setattr(policy, "negative_prompt", "")
            return encode(*args)

    monkeypatch.setattr(policy, "velocity", with_empty_text)
    monkeypatch.setattr(policy, "encode", encode_empty)


def lost_reference(policy, monkeypatch):
    encode = policy.encode

    def without(chosen, *args):
        return encode([dataclasses.replace(one, references=()) for one in chosen], *args)

    monkeypatch.setattr(policy, "encode", without)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("flux", another_prompt),
        ("z_image", another_prompt),
        ("stable_diffusion_3", next_sigma),
        ("stable_diffusion_3", lost_negative),
        ("z_image", lost_negative),
        ("stable_diffusion_3", another_negative),
        ("flux_kontext", lost_reference),
    ],
)
def test_planted_faults_are_refused_with_their_number(monkeypatch, name, plant, dtype):
    policy = load_generic(name, dtype)
    item = item_of(name)
    plant(policy, monkeypatch)
    with pytest.raises(PolicyLoadError, match="cannot be trained: at 32x64") as refused:
        prove(policy, item, SIZES, 3)
    assert int(re.search(r"up to (\d+) of 255 levels", str(refused.value)).group(1)) >= 5


@pytest.mark.parametrize(
    ("name", "argument", "problem"),
    [
        ("z_image", "prompt", "lack the prompt"),
        ("z_image", "negative_prompt", "lack the negative prompt"),
        ("flux_kontext", "image", "have 0 of 1 references"),
    ],
)
def test_what_both_ways_would_lose_is_refused(monkeypatch, name, argument, problem):
    policy = load_generic(name)
    complete = policy.pipeline_arguments

    def incomplete(item):
        return {key: value for key, value in complete(item).items() if key != argument}

    monkeypatch.setattr(policy, "pipeline_arguments", incomplete)
    with pytest.raises(PolicyLoadError, match=f"cannot be trained: .* {problem}"):
        prove(policy, item_of(name), SIZES, 3)


def test_rows_that_mix_in_a_forward_are_refused(monkeypatch):
    policy = load_generic("flux")
    velocity = policy.velocity
    monkeypatch.setattr(policy, "velocity", lambda *args: velocity(*args).flip(0))
    with pytest.raises(PolicyLoadError, match=r"in a forward of two samples, .* by \d+\.\d %"):
        prove(policy, item_of("flux"), SIZES, 3)


def test_what_a_pipeline_cannot_do_is_told(monkeypatch):
    """Another size, its own error, and a loop that hides its scheduler."""
    policy = load_generic("qwen_image")
    with pytest.raises(PolicyLoadError, match=r"QwenImagePipeline .* 36x64 fails .* one of 32x64"):
        prove(policy, item_of("qwen_image"), [(36, 64), (36, 64)], 3)
    # Only the first size is not the run's.
    proof = prove(policy, item_of("qwen_image"), [(36, 64), (64, 32)], 3)
    assert [(part.height, part.width) for part in proof.differences] == [(64, 32)]
    monkeypatch.setattr(type(policy.pipeline.transformer), "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(PolicyLoadError, match=r"fails \(ZeroDivisionError"):
        prove(policy, item_of("qwen_image"), SIZES, 3)
    # The trainer says what saves memory.
    without_memory = mock.Mock(side_effect=torch.OutOfMemoryError("tried to allocate 2 GiB"))
    monkeypatch.setattr(policy, "velocity", without_memory)
    with pytest.raises(torch.OutOfMemoryError):
        prove(policy, item_of("qwen_image"), SIZES, 3)
    policy = load_generic("flux")
    monkeypatch.setattr(type(policy.pipeline), "__call__", lambda *_, **__: None)
    policy = load_generic("flux")
    with pytest.raises(PolicyLoadError, match="does not use its scheduler's step"):
        prove(policy, item_of("flux"), SIZES, 3)
