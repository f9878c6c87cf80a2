"""The saved adapter in plain diffusers gives the trainer's image; damage to the file shows."""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_policies import disturb, items, trained
from tiny_run import tiny_options, train

from paco_grpo.options import RunOptions
from paco_grpo.options.schema import TestOptions
from paco_grpo.policies import adapters, lora
from paco_grpo.training.verification import verify_adapter

SIDE = 64  # FLUX.2's pipelines take no smaller reference


OPTIONS = RunOptions(test=TestOptions(resolution=SIDE, num_steps=3), item_size="exact")


def state_of(policy):
    """Everything that a verification must leave as it was."""
    weights = {}
    for name, parameter in policy.transformer.named_parameters():
        weights[name] = parameter.requires_grad, parameter.detach().numpy().tobytes()
    layers = [layer for layer in policy.transformer.modules() if hasattr(layer, "lora_A")]
    return weights, [list(layer.active_adapters) for layer in layers]


# Those whose pipelines would encode a reference at about a megapixel, and FLUX.
@pytest.mark.parametrize(
    "name",
    ["flux", "flux_kontext", "flux2_klein", "longcat_image_edit", "qwen_image_edit_plus"],
)
def test_a_file_is_compared_in_plain_diffusers(tiny_folder, tmp_path, name):
    """With another guidance than in use, and references of another shape."""
    policy = trained(name, tiny_folder(name), max_sequence_length=40, guidance_scale=2.0)
    lora.add_snapshot(policy, "old")
    adapters.save_diffusers(policy, tmp_path)
    (item,) = items(name, "make the star blue", size=(64, 128), reference=(128, 96))
    before = state_of(policy)
    result = verify_adapter(policy, OPTIONS, tmp_path, item)
    assert result.difference < 0.1 and result.effect > 1 and result.passed
    assert state_of(policy) == before

    file = tmp_path / "pytorch_lora_weights.safetensors"
    half = {key: t * (0.5 if ".lora_B." in key else 1) for key, t in load_file(file).items()}
    save_file(half, file)
    weaker = verify_adapter(policy, OPTIONS, tmp_path, item)
    assert weaker.effect == result.effect and not weaker.passed
    assert state_of(policy) == before


def test_in_bfloat16_with_everything_offloaded(tiny_folder, tmp_path):
    name = "qwen_image_edit_plus"
    policy = trained(name, tiny_folder(name), dtype=torch.bfloat16, max_sequence_length=40)
    policy.offload(text_encoders=True, vae=True)
    adapters.save_diffusers(policy, tmp_path)
    (item,) = items(name, "make the star blue", size=(SIDE, SIDE))
    result = verify_adapter(policy, OPTIONS, tmp_path, item)
    assert result.passed and result.file_error < 0.1
    assert result.difference < result.effect / 4  # plain diffusers rounds elsewhere
    disturb(policy, seed=3)  # the file is of other weights than the policy's
    assert not verify_adapter(policy, OPTIONS, tmp_path, item).passed


def test_a_run_ends_with_it(tiny_flux_dir, tmp_path, caplog):
    caplog.set_level(logging.INFO, "paco_grpo")
    changes = {"num_epochs": 1, "train__learning_rate": 0.05, "test__num_images": 1}
    run = train(tiny_options(tiny_flux_dir, tmp_path, **changes)).run
    card = run.folder / "checkpoints" / "epoch_0001" / "diffusers" / "README.md"
    (sentence,) = (line for line in card.read_text().splitlines() if "plain diffusers" in line)
    assert "up to 0.00 of 255 levels" in sentence
    assert sentence in caplog.text
