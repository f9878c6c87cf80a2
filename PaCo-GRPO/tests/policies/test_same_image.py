"""Every policy through our rollout equals diffusers' pipeline called with the same seed, steps and sizes."""

import numpy as np
import pytest
import torch
from diffusers import QwenImageEditPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from PIL import Image
from tiny_policies import EDITORS, NAMES, items, load, picture

from paco_grpo.sampling.denoise import rollout
from paco_grpo.sampling.images import batches_by_key
from paco_grpo.types import Item

STEPS = 3
NEGATIVE = "blurred"


def ours(policy, chosen, seeds, **options):
    """Latents and images of ``chosen`` in their order, and the batch size of each transformer forward."""
    latents, images, forwards = [None] * len(chosen), [None] * len(chosen), []
    forward = policy.transformer.forward

    def counted(*args, **kwargs):
        forwards.append(len(kwargs["hidden_states"]))
        return forward(*args, **kwargs)

    policy.transformer.forward = counted
    options = {"noise_steps": (), "noise_level": 0.7} | options
    for batch in batches_by_key([policy.batch_key(item) for item in chosen], 8):
        group = [chosen[i] for i in batch]
        height, width = group[0].height, group[0].width
        record = rollout(
            policy, policy.encode(group), [item.item_id for item in group], [seeds[i] for i in batch], height, width,
            num_steps=STEPS, **options,
        )  # fmt: skip
        for i, row, image in zip(
            batch, record.clean_latents, policy.decode(record.clean_latents, height, width), strict=True
        ):
            latents[i], images[i] = row, image
    policy.transformer.forward = forward
    return latents, images, forwards


def theirs(pipe, policy, item, seed, monkeypatch, output_type):
    """One call of diffusers' pipeline, one image at a time."""
    arguments = {
        "prompt": item.prompt, "height": item.height, "width": item.width, "num_inference_steps": STEPS,
        "generator": [torch.Generator().manual_seed(seed)], "output_type": output_type,
    }  # fmt: skip
    size = policy.reference_size(item)[::-1] if policy.edits_images else None  # width, height
    if isinstance(pipe, QwenImageEditPipeline):
        # The pipeline reads references at a megapixel, whatever it is asked to draw: give it our size.
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
    """Two sizes, each twice; one reference in another shape than its image, and one that is grey."""
    chosen = items(name, "make the star blue", "a") + items(name, "and now for something longer", size=(32, 64))
    if name not in EDITORS:
        return [*chosen, Item(3, "b", 32, 64), Item(4, "c", 48, 32)]
    chosen += [
        Item(3, "b", 32, 64, image=picture(7, 30, 60)),
        Item(4, "c", 32, 32, image=picture(8, 96, 32).convert("L")),
    ]
    return chosen


@pytest.mark.parametrize("name", NAMES)
def test_same_image_as_the_diffusers_pipeline(tiny_folder, monkeypatch, name):
    options = (
        {"negative_prompt": NEGATIVE, "guidance_scale": 3.0} if name == "qwen_image_edit" else {"guidance_scale": 2.5}
    )
    policy = load(name, tiny_folder(name), max_sequence_length=40, **options)
    chosen, seeds = mixed_items(name), [5, 2**31 + 7, 11, 12, 13]
    latents, images, forwards = ours(policy, chosen, seeds)
    # three groups; a forward each per step (two with true CFG), never one by one
    assert sorted(forwards) == sorted([2, 2, 1] * STEPS * (2 if name == "qwen_image_edit" else 1))

    pipe = policy.pipeline_class.from_pretrained(tiny_folder(name))
    pipe.set_progress_bar_config(disable=True)
    for item, seed, latent, image in zip(chosen, seeds, latents, images, strict=True):
        reference = theirs(pipe, policy, item, seed, monkeypatch, "latent")
        assert reference.shape == latent.shape and (latent - reference).abs().max() < 1e-4
        drawn = theirs(pipe, policy, item, seed, monkeypatch, "pil")
        assert image.size == drawn.size == (item.width, item.height) and image.mode == "RGB"
        assert np.abs(np.asarray(image, np.int16) - np.asarray(drawn, np.int16)).max() <= 1

    silent, _, _ = ours(policy, chosen, seeds, noise_steps=(1,), noise_level=0.0)
    assert all(torch.equal(a, b) for a, b in zip(silent, latents, strict=True))


def test_without_negative_prompt_there_is_no_cfg(tiny_folder, monkeypatch):
    name = "qwen_image_edit"
    policy = load(name, tiny_folder(name), negative_prompt=None)
    chosen = items(name, "make it blue")
    (latent,), _, forwards = ours(policy, chosen, [3])
    assert forwards == [1] * STEPS
    pipe = QwenImageEditPipeline.from_pretrained(tiny_folder(name))
    pipe.set_progress_bar_config(disable=True)
    assert (latent - theirs(pipe, policy, chosen[0], 3, monkeypatch, "latent")).abs().max() < 1e-4
    guided, _, _ = ours(load(name, tiny_folder(name)), chosen, [3])
    assert (latent - guided[0]).abs().max() > 1e-3


def test_true_cfg_keeps_the_norm_of_the_conditional_velocity(tiny_folder):
    name = "qwen_image_edit"
    policy = load(name, tiny_folder(name), guidance_scale=5.0)
    conditioning = policy.encode(items(name, "one", "two and more"))
    latents, sigma = policy.initial_latents([1, 2], 32, 32), torch.tensor([0.9, 0.4])
    arguments = latents, sigma, conditioning, 32, 32
    conditional = policy.conditional_velocity(*arguments).double().numpy()
    text = conditioning.negative_embeds, conditioning.negative_mask
    negative = policy._velocity(latents, sigma, conditioning, text, "negative", 32, 32).double().numpy()
    combined = negative + 5.0 * (conditional - negative)
    expected = combined * np.linalg.norm(conditional, axis=-1, keepdims=True)
    expected /= np.linalg.norm(combined, axis=-1, keepdims=True)
    guided = policy.velocity(*arguments).numpy()
    np.testing.assert_allclose(guided, expected, atol=1e-5)
    assert np.abs(guided - conditional).max() > 1e-2


def test_kontext_reference_tokens_have_ids_of_their_own_and_give_no_velocity(tiny_folder):
    name = "flux_kontext"
    policy = load(name, tiny_folder(name))
    conditioning = policy.encode(items(name, "one", reference=(32, 96)))
    seen, outputs = {}, []
    forward = policy.transformer.forward

    def watched(*args, **kwargs):
        seen.update(kwargs)
        outputs.append(forward(*args, **kwargs)[0])
        return (outputs[-1],)

    policy.transformer.forward = watched
    latents = policy.initial_latents([1], 32, 32)
    velocity = policy.velocity(latents, torch.tensor([0.5]), conditioning, 32, 32)
    rows, columns = conditioning.reference_grid[0].tolist()
    ids = seen["img_ids"]
    assert (rows, columns) == (2, 6)  # 32x96 at the area of 32x32, down to multiples of 8: 16x48
    assert ids.shape == (16 + 12, 3)
    assert torch.equal(ids[:16, 0], torch.zeros(16)) and torch.equal(ids[16:, 0], torch.ones(12))
    assert ids[-1].tolist() == [1, 1, 5]
    assert torch.equal(velocity, outputs[0][:, :16]) and outputs[0].shape[1] == 28
