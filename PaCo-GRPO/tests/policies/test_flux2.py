"""FLUX.2-dev and Klein: what is theirs alone. What every family must do: test_families.py."""

import json

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file
from tiny_pipelines import build_tiny_flux2
from tiny_policies import items, load, picture

from paco_grpo.policies import PolicyLoadError, PolicySettings, load_policy
from paco_grpo.types import Item

KLEIN = "flux2_klein"


@pytest.fixture
def klein(tiny_folder):
    return load(KLEIN, tiny_folder(KLEIN))


def test_references_are_scaled_down_and_cut_as_in_the_pipeline(klein):
    processor = klein.pipeline.image_processor
    for shape, area in (((1000, 1400), (2048, 2048)), ((70, 69), (1024, 512))):
        image = picture(0, *shape)
        item = Item(0, "x", *area, references=(image,))
        (reference,) = klein._read(item)
        small = (
            processor._resize_to_target_area(image, 1024**2)
            if image.width * image.height > 1024**2
            else image
        )
        height, width = (side // 8 * 8 for side in (small.height, small.width))
        assert reference.size == klein.reference_size(image, item) == (height, width)
        theirs = processor.preprocess(small, height=height, width=width, resize_mode="crop")
        assert torch.equal(processor.preprocess(reference.image, *reference.size), theirs)
    # a reference is scaled to the generated image's area, so training at low resolution is cheap
    assert klein.reference_size(picture(0, 200, 300), Item(0, "x", 96, 96)) == (
        72,
        112,
    )  # 78 x 117 before
    with pytest.raises(ValueError, match="item 7"):
        klein.encode([Item(7, "x", 32, 32, references=(picture(0, 6, 100),))])


def test_a_reference_of_the_generated_shape_covers_it(klein):
    """Its middle is kept, and nothing is stretched."""
    image = Image.new("RGB", (101, 149))
    image.paste((255, 0, 0), (50, 0, 51, 149))  # a line in the middle
    (reference,) = klein._read(Item(0, "x", 120, 80, references=(image,)))
    pixels = np.asarray(reference.image)[..., 0]
    assert pixels.shape == (120, 80)
    assert np.array_equal(pixels[:, 39], pixels[:, 40]) and pixels.argmax(axis=1).min() >= 39
    small = Item(0, "x", 240, 160, references=(image,))  # enlarged, for the same grid of tokens
    assert klein._read(small)[0].size == (240, 160)
    photo = picture(4, 149, 101)
    (reference,) = klein._read(Item(0, "x", 120, 80, references=(photo,)))
    sharp = ImageOps.fit(photo, (80, 120), Image.Resampling.LANCZOS)
    assert reference.image.tobytes() == sharp.tobytes()


@pytest.mark.parametrize("name", ["flux2", KLEIN])
def test_bfloat16_rounds_neither_the_time_nor_the_statistics(tiny_folder, name):
    policy = load(name, tiny_folder(name), dtype=torch.bfloat16)
    saved = load_file(tiny_folder(name) / "vae" / "diffusion_pytorch_model.safetensors")
    assert all(
        torch.equal(tensor, saved[key]) for key, tensor in policy.pipeline.vae.state_dict().items()
    )
    times = []
    sigma = torch.tensor([0.93418])
    policy.transformer.time_guidance_embed.time_proj.register_forward_pre_hook(
        lambda _, args: times.append(args[0])
    )
    velocity = policy.velocity(
        policy.initial_latents([1], 32, 32), sigma, policy.encode(items(name, "x")), 32, 32
    )
    assert velocity.dtype == torch.float32 and torch.equal(times[0], 1000 * sigma)


def test_a_distilled_model_is_refused_guidance_before_its_weights_are_read(tmp_path):
    folder = tmp_path / "whole"
    build_tiny_flux2(is_distilled=True).save_pretrained(folder)
    (tmp_path / "model_index.json").write_text((folder / "model_index.json").read_text())
    assert json.loads((tmp_path / "model_index.json").read_text())["is_distilled"]
    with pytest.raises(PolicyLoadError, match=r"config\.sample\.guidance_scale"):
        load_policy(tmp_path, PolicySettings(guidance_scale=4.0))
    assert not load(KLEIN, folder, guidance_scale=1.0).uses_true_cfg
