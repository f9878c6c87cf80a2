"""The saved adapter in plain diffusers gives the trainer's image; damage to the file shows."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_policies import FAMILIES, disturb, items, trained

from paco_grpo.evaluation.verify import skip_reason, verify_adapter
from paco_grpo.options import RunOptions
from paco_grpo.options.schema import TestOptions
from paco_grpo.policies import lora

SIDE = 64  # FLUX.2's pipelines take no smaller reference


OPTIONS = RunOptions(test=TestOptions(resolution=SIDE, num_steps=3), item_size="exact")


def state_of(policy):
    """Everything that a verification must leave as it was."""
    parameters = policy.transformer.named_parameters()
    flags = {name: (p.requires_grad, p.detach().clone()) for name, p in parameters}
    active = [
        list(layer.active_adapters)
        for layer in policy.transformer.modules()
        if hasattr(layer, "active_adapters") and hasattr(layer, "lora_A")
    ]
    return flags, active


def assert_unchanged(before, policy):
    (flags, active), (flags_now, active_now) = before, state_of(policy)
    assert active == active_now and flags.keys() == flags_now.keys()
    for name, (trainable, values) in flags.items():
        assert trainable == flags_now[name][0], name
        assert torch.equal(values, flags_now[name][1]), name


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family(tiny_folder, tmp_path, name):
    policy = trained(name, tiny_folder(name), max_sequence_length=40)
    lora.add_snapshot(policy, "old")
    lora.save_diffusers(policy, tmp_path)
    (item,) = items(name, "make the star blue", size=(SIDE, SIDE))
    before = state_of(policy)
    verification = verify_adapter(policy, OPTIONS, tmp_path, item)
    assert verification.difference < 0.1 and verification.effect > 1 and verification.passed
    assert "plain diffusers" in str(verification)
    assert_unchanged(before, policy)

    file = tmp_path / "pytorch_lora_weights.safetensors"
    half = {key: t * (0.5 if ".lora_B." in key else 1) for key, t in load_file(file).items()}
    save_file(half, file)
    weaker = verify_adapter(policy, OPTIONS, tmp_path, item)
    assert weaker.effect == verification.effect and not weaker.passed
    assert "DOES NOT HOLD" in str(weaker) and "DOES NOT HOLD" not in str(verification)
    assert_unchanged(before, policy)


@pytest.mark.parametrize("name", ["flux", "qwen_image_edit_plus", "flux2_klein"])
def test_in_bfloat16_with_everything_offloaded(tiny_folder, tmp_path, name):
    policy = trained(name, tiny_folder(name), dtype=torch.bfloat16, max_sequence_length=40)
    policy.offload(text_encoders=True, vae=True)
    lora.save_diffusers(policy, tmp_path)
    (item,) = items(name, "make the star blue", size=(SIDE, SIDE))
    verification = verify_adapter(policy, OPTIONS, tmp_path, item)
    assert verification.passed and verification.file_error < 0.1
    assert verification.difference < verification.effect / 4  # plain diffusers rounds elsewhere
    disturb(policy, seed=3)  # the file is of other weights than the policy's
    assert not verify_adapter(policy, OPTIONS, tmp_path, item).passed


def test_references_of_another_shape_and_another_guidance(tiny_folder, tmp_path):
    """The pipelines would encode them at about a megapixel."""
    for name in ("flux_kontext", "qwen_image_edit", "qwen_image_edit_plus", "flux2_klein"):
        changes = {"guidance_scale": 2.0}
        if name == "flux2_klein":
            changes["negative_prompt"] = "blurred"
        policy = trained(name, tiny_folder(name), max_sequence_length=40, **changes)
        lora.save_diffusers(policy, tmp_path / name)
        (item,) = items(name, "make the star blue", size=(64, 128), reference=(128, 96))
        assert verify_adapter(policy, OPTIONS, tmp_path / name, item).difference < 0.1


@pytest.mark.parametrize(
    ("group", "change", "word"),
    [
        (None, {"use_lora": False}, "use_lora"), ("train", {"sharding": "fsdp2"}, "sharded"),
        ("pretrained", {"quantize": "nf4"}, "quantized"), (None, {}, None),
    ],
)  # fmt: skip
def test_what_is_not_compared_is_said(group, change, word):
    options = RunOptions()
    if group is not None:
        change = {group: dataclasses.replace(getattr(options, group), **change)}
    reason = skip_reason(dataclasses.replace(options, **change))
    assert reason is None if word is None else word in reason
