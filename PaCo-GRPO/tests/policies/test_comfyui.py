"""ComfyUI's names of layers beside those of every family's LoRA, and the file that it reads."""

import re

import pytest
import torch
from safetensors.torch import load_file
from tiny_policies import FAMILIES, load, trained

from paco_grpo.policies.adapters import _state, add_frozen_lora, add_lora, save_diffusers, save_peft
from paco_grpo.policies.comfyui import names_of, skipped_layers

UNKNOWN = ("longcat_image", "longcat_image_edit", "yours")
# Of all linear layers, ComfyUI skips some of these two, and none of the others.
SKIPPED = {"flux2": (7, 39), "flux2_klein": (5, 37)}


@pytest.mark.parametrize("name", [*FAMILIES, "stable_diffusion_3 large"])
def test_comfyui_loads_every_default_target(tiny_folder, name):
    policy = load(name, tiny_folder(name))
    add_lora(policy, rank=2, alpha=4)
    assert (names_of(policy) is None) == (name in UNKNOWN)
    assert skipped_layers(policy) is None
    policy = load(name, tiny_folder(name))
    add_lora(policy, rank=2, alpha=4, targets=".*")
    sentence = skipped_layers(policy)
    assert (sentence is None) == (name not in SKIPPED)
    if sentence:
        counts = [int(number) for number in re.findall(r"\b\d+\b", sentence)]
        assert tuple(counts) == SKIPPED[name]
        assert "time_guidance_embed.timestep_embedder.linear_1" in sentence


def test_the_layers_of_a_file_count_and_those_of_a_teacher_do_not(tiny_folder, tmp_path):
    folder = tiny_folder("flux2_klein")
    everywhere = load("flux2_klein", folder)
    add_lora(everywhere, rank=2, alpha=4, targets=["attn.to_q", "single_stream_modulation.linear"])
    save_peft(everywhere, tmp_path)
    policy = load("flux2_klein", folder)
    add_lora(policy, lora_path=tmp_path)
    assert "single_stream_modulation.linear" in skipped_layers(policy)
    whole = type(policy.transformer)
    policy.transformer.__class__ = type(f"FSDP{whole.__name__}", (whole,), {})  # when it is sharded
    assert "single_stream_modulation.linear" in skipped_layers(policy)
    policy = load("flux2_klein", folder)
    add_lora(policy, rank=3, alpha=6)
    add_frozen_lora(policy, "teacher", tmp_path, "option")
    assert skipped_layers(policy) is None


@pytest.mark.parametrize("name", ["flux", "qwen_image", "stable_diffusion_3", "z_image"])
def test_the_file_has_comfyuis_names_and_its_scale_in_b(tiny_folder, tmp_path, name):
    """Without an alpha, ComfyUI scales by 1."""
    policy = trained(name, tiny_folder(name), rank=4, alpha=10)
    save_diffusers(policy, tmp_path)
    (file,) = tmp_path.iterdir()
    saved = load_file(file)
    layer = re.compile(rf"transformer\.({names_of(policy).layers})\.lora_[AB]\.weight")
    assert [key for key in saved if not layer.fullmatch(key)] == []
    state = _state(policy.transformer)
    assert len(saved) == len(state)
    for key, tensor in state.items():
        scale = 2.5 if ".lora_B." in key else 1.0
        torch.testing.assert_close(saved[f"transformer.{key}"], scale * tensor)
