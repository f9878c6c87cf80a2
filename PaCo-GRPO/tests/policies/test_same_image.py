"""Every policy through our rollout equals diffusers' pipeline with the same seed, steps and sizes."""

import dataclasses

import numpy as np
import pytest
import torch
from diffusers import QwenImageEditPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from PIL import Image
from tiny_flux import build_tiny_flux
from tiny_policies import EDITORS, NAMES, disturb, items, load, picture

from paco_grpo.policies.lora import add_lora, save_diffusers
from paco_grpo.sampling.denoise import rollout
from paco_grpo.sampling.images import batches_by_key
from paco_grpo.types import Item

STEPS = 3


def sample(policy, chosen, seeds, **options):
    """Latents and images of ``chosen`` in their order, and the batch size of each transformer forward."""
    latents, images, forwards = [None] * len(chosen), [None] * len(chosen), []
    hook = policy.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: forwards.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    options = {"noise_steps": (), "noise_level": 0.7} | options
    for batch in batches_by_key([policy.batch_key(item) for item in chosen], 8):
        group = [chosen[i] for i in batch]
        height, width = group[0].height, group[0].width
        ids = [item.item_id for item in group]
        record = rollout(
            policy, policy.encode(group), ids, [seeds[i] for i in batch], height, width, num_steps=STEPS, **options
        )
        drawn = policy.decode(record.clean_latents, height, width)
        for i, row, image in zip(batch, record.clean_latents, drawn, strict=True):
            latents[i], images[i] = row, image
    hook.remove()
    return latents, images, forwards


def load_pipeline(policy, folder):
    pipe = policy.pipeline_class.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    exec(policy.pipeline_setup, {"pipe": pipe})  # noqa: S102 - as the model card says
    return pipe


def call_pipeline(pipe, policy, item, seed, monkeypatch, output_type):
    """One call of diffusers' pipeline, one image at a time."""
    arguments = {
        "prompt": item.prompt, "height": item.height, "width": item.width, "num_inference_steps": STEPS,
        "generator": [torch.Generator().manual_seed(seed)], "output_type": output_type,
    }  # fmt: skip
    size = policy.reference_size(item)[::-1] if policy.edits_images else None  # width, height
    if isinstance(pipe, QwenImageEditPipeline):
        # The pipeline always resizes references to a megapixel: make it use our size.
        monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: (*size, None))
        arguments |= {"image": item.image.convert("RGB"), "true_cfg_scale": policy.guidance_scale}
        arguments["negative_prompt"] = policy.negative_prompt
    else:
        arguments |= {"guidance_scale": policy.guidance_scale, "max_sequence_length": policy.max_sequence_length}
        if policy.edits_images:
            reference = item.image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
            arguments |= {"image": reference, "max_area": item.height * item.width, "_auto_resize": False}
    return pipe(**arguments).images[0]


def mixed_items(name):
    """Two sizes, each twice, and a third; one reference has another shape than its image, one is grey."""
    chosen = items(name, "make the star blue", "a") + items(name, "and now for something longer", size=(32, 64))
    if name not in EDITORS:
        return [*chosen, Item(3, "b", 32, 64), Item(4, "c", 48, 32)]
    grey = picture(8, 96, 32).convert("L")
    return [*chosen, Item(3, "b", 32, 64, image=picture(7, 30, 60)), Item(4, "c", 32, 32, image=grey)]


@pytest.mark.parametrize("name", [*NAMES, "flux with another VAE, without guidance"])
def test_same_image_as_the_diffusers_pipeline(tiny_folder, monkeypatch, name, tmp_path):
    if name in NAMES:
        folder = tiny_folder(name)
    else:
        folder = build_tiny_flux(tmp_path, vae_channels=(4, 8), latent_channels=3, guidance_embeds=False)
        name = "flux"
    true_cfg = name == "qwen_image_edit"
    options = {"negative_prompt": "blurred", "guidance_scale": 3.0} if true_cfg else {"guidance_scale": 2.5}
    policy = load(name, folder, max_sequence_length=40, **options)
    chosen, seeds = mixed_items(name), [5, 2**31 + 7, 11, 12, 13]
    latents, images, forwards = sample(policy, chosen, seeds)
    # three groups; one forward each per step (two with true CFG)
    assert sorted(forwards) == sorted([2, 2, 1] * STEPS * (2 if true_cfg else 1))

    pipe = load_pipeline(policy, folder)
    for item, seed, latent, image in zip(chosen, seeds, latents, images, strict=True):
        expected = call_pipeline(pipe, policy, item, seed, monkeypatch, "latent")
        assert expected.shape == latent.shape and (latent - expected).abs().max() < 1e-4
        drawn = call_pipeline(pipe, policy, item, seed, monkeypatch, "pil")
        assert image.size == drawn.size == (item.width, item.height) and image.mode == "RGB"
        assert np.abs(np.asarray(image, np.int16) - np.asarray(drawn, np.int16)).max() <= 1

    silent, _, _ = sample(policy, chosen, seeds, noise_steps=(1,), noise_level=0.0)
    assert all(torch.equal(a, b) for a, b in zip(silent, latents, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_same_image_with_an_adapter_in_plain_diffusers(tiny_folder, monkeypatch, name, tmp_path):
    policy = load(name, tiny_folder(name))
    add_lora(policy, rank=3, alpha=6)
    disturb(policy)
    chosen = items(name, "a green cross")
    _, (ours,), _ = sample(policy, chosen, [4])
    save_diffusers(policy, tmp_path)
    pipe = load_pipeline(policy, tiny_folder(name))
    base = call_pipeline(pipe, policy, chosen[0], 4, monkeypatch, "pil")
    pipe.load_lora_weights(str(tmp_path))
    theirs = call_pipeline(pipe, policy, chosen[0], 4, monkeypatch, "pil")
    ours, theirs, base = (np.asarray(image, np.int16) for image in (ours, theirs, base))
    assert np.abs(theirs - ours).max() <= 1 and np.abs(theirs - base).max() > 3


def test_without_a_negative_prompt_there_is_no_cfg(tiny_folder, monkeypatch):
    name = "qwen_image_edit"
    policy = load(name, tiny_folder(name), negative_prompt=None, image_positions="stock")
    assert not policy.pipeline_setup  # the installed pipeline as it is
    chosen = items(name, "make it blue")
    (latent,), _, forwards = sample(policy, chosen, [3])
    assert forwards == [1] * STEPS
    pipe = load_pipeline(policy, tiny_folder(name))
    assert (latent - call_pipeline(pipe, policy, chosen[0], 3, monkeypatch, "latent")).abs().max() < 1e-4
    guided, _, _ = sample(load(name, tiny_folder(name), image_positions="stock"), chosen, [3])
    assert (latent - guided[0]).abs().max() > 1e-3


def test_true_cfg_keeps_the_norm_of_the_conditional_velocity(tiny_folder):
    name = "qwen_image_edit"
    policy = load(name, tiny_folder(name), guidance_scale=5.0)
    conditioning = policy.encode(items(name, "one", "two and more"))
    latents, sigma = policy.initial_latents([1, 2], 32, 32), torch.tensor([0.9, 0.4])

    def unguided(conditioning):
        return policy.velocity(latents, sigma, conditioning, 32, 32, guided=False).double().numpy()

    conditional = unguided(conditioning)
    negative = unguided(
        dataclasses.replace(
            conditioning, prompt_embeds=conditioning.negative_embeds, prompt_mask=conditioning.negative_mask
        )
    )
    combined = negative + 5.0 * (conditional - negative)
    expected = combined * np.linalg.norm(conditional, axis=-1, keepdims=True)
    expected /= np.linalg.norm(combined, axis=-1, keepdims=True)
    guided = policy.velocity(latents, sigma, conditioning, 32, 32).numpy()
    np.testing.assert_allclose(guided, expected, atol=1e-5)
    assert np.abs(guided - conditional).max() > 1e-2
