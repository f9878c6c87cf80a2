"""FLUX.2-dev and Klein: what is theirs alone. What every family must do: test_families.py."""

import json
import logging

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_pipelines import build_tiny_flux2
from tiny_policies import picture

from paco_grpo.policies import PolicyLoadError, load_policy, lora
from paco_grpo.sampling.denoise import Sampling, rollout
from paco_grpo.sampling.images import at_size
from paco_grpo.types import Item

LENGTH = 40
CASES = {  # folder, guidance scale
    "klein": ({}, 3.0),
    "klein without CFG": ({}, 1.0),
    "distilled": ({"is_distilled": True}, 1.0),
    "dev": ({"klein": False}, 2.5),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: build_tiny_flux2(tmp_path_factory.mktemp("flux2"), **how) for name, (how, _) in CASES.items()}


@pytest.fixture(params=CASES)
def case(request):
    return request.param


def load(folders, case="klein", **options):
    return load_policy(folders[case], **({"max_sequence_length": LENGTH, "guidance_scale": CASES[case][1]} | options))


@pytest.fixture
def policy(folders, case):
    return load(folders, case)


def edit(number, prompt, *sizes, size=(64, 48)):
    """An item with a picture of each height and width of ``sizes``."""
    pictures = [picture(number + i, *shape) for i, shape in enumerate(sizes)]
    return Item(number, prompt, *size, image=pictures[0] if sizes else None, more_images=tuple(pictures[1:]))


def latents_of(policy, items, seeds, **options):
    height, width = items[0].height, items[0].width
    ids = [item.item_id for item in items]
    options = {"num_steps": 3} | options
    return rollout(policy, policy.encode(items), ids, seeds, height, width, Sampling(**options)).clean_latents


def pixels_of(policy, latents, item):
    with torch.no_grad():
        pixels = policy._pixels(policy._unpack(latents, item.height, item.width))
    return policy.pipeline.image_processor.postprocess(pixels, output_type="pt")


def stock(policy, folder, item, seed, pipe=None, **options):
    """What the installed pipeline makes of ``item``."""
    pipe = pipe or policy.pipeline_class.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe(
        prompt=item.prompt, image=list(item.images) or None, height=item.height, width=item.width, num_inference_steps=3,
        guidance_scale=policy.guidance_scale, generator=torch.Generator().manual_seed(seed), output_type="pt",
        max_sequence_length=policy.max_sequence_length, **options,
    ).images  # fmt: skip


@pytest.mark.parametrize("references", [(), ((64, 72),), ((70, 69), (64, 64))])
def test_same_image_as_the_pipeline(folders, policy, case, references):
    # the references have at most the generated area, so the pipeline, too, only cuts their edges
    item = edit(1, "make the star blue", *references, size=(80, 72))
    ours = pixels_of(policy, latents_of(policy, [item], [5]), item)
    assert (ours - stock(policy, folders[case], item, 5)).abs().max() < 1e-5


def test_positions_are_those_of_the_pipeline(folders):
    policy, grids = load(folders), ((4, 6), (2, 3), (5, 1))
    text, images = policy._ids_for(7, *grids)
    latents = [torch.zeros(1, 16, *grid) for grid in grids]
    pipeline = policy.pipeline
    assert torch.equal(text, pipeline._prepare_text_ids(torch.zeros(1, 7, 1))[0])
    drawn, references = pipeline._prepare_latent_ids(latents[0])[0], pipeline._prepare_image_ids(latents[1:])[0]
    assert torch.equal(images, torch.cat([drawn, references]))
    item = edit(1, "x", (64, 64), (48, 64), size=(64, 64))
    first, second = (
        policy.encode([edit(1 + i, "x", image.size[::-1], size=(64, 64))]) for i, image in enumerate(item.images)
    )
    both = policy.encode([item])  # one after the other, in their order
    assert torch.equal(both.reference, torch.cat([first.reference, second.reference], dim=1))
    assert both.reference_grid.tolist() == [[[8, 8], [6, 8]]]


def test_references_are_scaled_down_and_cut_as_in_the_pipeline(folders):
    policy = load(folders)
    processor = policy.pipeline.image_processor
    for shape, area in (((1000, 1500), (1024, 1024)), ((1000, 1500), (2048, 2048)), ((70, 69), (1024, 1024))):
        image = picture(0, *shape)
        reference = policy._resized(image, Item(0, "x", *area))
        small = processor._resize_to_target_area(image, 1024**2) if image.width * image.height > 1024**2 else image
        height, width = (side // 8 * 8 for side in (small.height, small.width))
        assert reference.size == policy.reference_size(image, Item(0, "x", *area)) == (height, width)
        theirs = processor.preprocess(small, height=height, width=width, resize_mode="crop")
        assert torch.equal(processor.preprocess(reference.image, *reference.size), theirs)
    # training small costs little: the area is that of the generated image
    assert policy.reference_size(picture(0, 200, 300), Item(0, "x", 96, 96)) == (72, 112)  # 78 x 117 before
    with pytest.raises(ValueError, match="item 7 has 100x6 pixels"):
        policy.encode([Item(7, "x", 32, 32, image=picture(0, 6, 100))])


def test_the_first_reference_gives_an_edit_its_shape(folders, caplog):
    policy = load(folders)
    with caplog.at_level(logging.INFO):
        sized = at_size(edit(0, "x", (150, 100), (64, 64), size=(None, None)), 96, "aspect", policy)
    assert (sized.height, sized.width) == (112, 72)  # 117.6 x 78.4
    assert policy.reference_size(sized.image, sized) == (104, 72)  # of the generated area, 8064, in its shape
    plain = at_size(Item(0, "x", 100, 100), 64, "exact", policy)  # without a reference
    assert (plain.height, plain.width) == (96, 96)


def test_other_references_do_not_share_a_forward(folders):
    policy = load(folders)
    mixed = [edit(0, "x", (64, 64)), edit(1, "x", (64, 64), (64, 64)), edit(2, "x"), edit(3, "x", (64, 56))]
    assert len({policy.batch_key(item) for item in mixed}) == 4
    conditioning = policy.encode(mixed)
    with pytest.raises(ValueError, match="batch_key"):
        policy.velocity(policy.initial_latents(range(4), 64, 48), torch.full((4,), 0.5), conditioning, 64, 48)
    for row, item in enumerate(mixed):  # padding behind a row's own references is never read
        part = policy.encode([item]), conditioning.select([row])
        velocities = [
            policy.velocity(policy.initial_latents([1], 64, 48), torch.tensor([0.5]), c, 64, 48) for c in part
        ]
        torch.testing.assert_close(*velocities, rtol=0, atol=1e-6)


def test_the_negative_prompt_is_kept_once(folders):
    policy = load(folders)
    halves = [policy.encode([edit(number, "x")]) for number in (0, 1)]
    both = type(halves[0]).cat(halves)
    assert len(both) == 2 and both.negative_embeds.shape == (1, LENGTH, 48)
    assert both.select([1, 0, 1]).negative_embeds.shape == (1, LENGTH, 48)
    other = load(folders, negative_prompt="blurred").encode([edit(0, "x")])
    assert not torch.equal(other.negative_embeds, both.negative_embeds)
    assert load(folders, "klein without CFG").encode([edit(0, "x")]).negative_embeds is None


def test_true_cfg_is_not_rescaled(folders):
    policy = load(folders)
    conditioning, latents, sigma = (
        policy.encode([edit(0, "x")]),
        policy.initial_latents([1], 64, 48),
        torch.tensor([0.7]),
    )
    guided, conditional = (policy.velocity(latents, sigma, conditioning, 64, 48, guided=g) for g in (True, False))
    conditioning.prompt_embeds = conditioning.negative_embeds
    negative = policy.velocity(latents, sigma, conditioning, 64, 48, guided=False)
    expected = negative.double() + 3.0 * (conditional.double() - negative.double())
    torch.testing.assert_close(guided.double(), expected, rtol=0, atol=1e-5)


def test_schedule(folders):
    """μ depends on tokens and steps, and falls beyond 4300 tokens."""
    policy = load(folders)
    for steps, rows, columns in ((4, 32, 32), (10, 32, 32), (50, 64, 64), (10, 68, 64)):
        tokens = rows * columns
        mu = 1.6927e-4 * tokens + 0.45666666
        if tokens <= 4300:
            mu += (8.73809524e-5 * tokens + 1.89833333 - mu) * (200 - steps) / 190
        linear = np.linspace(1, 1 / steps, steps)
        expected = [*(np.exp(mu) / (np.exp(mu) + 1 / linear - 1)), 0.0]
        np.testing.assert_allclose(policy.sigmas(steps, 8 * rows, 8 * columns), expected, atol=1e-6)


def test_bfloat16_rounds_neither_the_time_nor_the_statistics(folders, case):
    policy = load(folders, case, dtype=torch.bfloat16)
    saved = load_file(folders[case] / "vae" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in policy.pipeline.vae.state_dict().items())
    times, sigma = [], torch.tensor([0.93418])
    policy.transformer.time_guidance_embed.time_proj.register_forward_pre_hook(lambda _, args: times.append(args[0]))
    velocity = policy.velocity(
        policy.initial_latents([1], 64, 48), sigma, policy.encode([edit(0, "x", (64, 64))]), 64, 48
    )
    assert velocity.dtype == torch.float32 and torch.equal(times[0], 1000 * sigma)


def test_a_suffix_that_a_list_of_layers_also_has(folders):
    """``attn.to_out`` is a linear layer in single blocks, a list in double blocks."""
    policy = load(folders)
    lora.add_lora(policy, rank=2, alpha=2)
    layers = {name.split(".lora_")[0] for name, _ in policy.transformer.named_parameters() if ".lora_" in name}
    assert len(layers) == 2 * 12 + 2 * 2
    assert {f"single_transformer_blocks.{i}.attn.{n}" for i in (0, 1) for n in ("to_out", "to_qkv_mlp_proj")} <= layers
    policy = load(folders)
    lora.add_lora(policy, rank=2, alpha=2, targets=["attn.to_out", "attn.to_out.0"])
    layers = {name.split(".lora_")[0] for name, _ in policy.transformer.named_parameters() if ".lora_" in name}
    assert layers == {f"single_transformer_blocks.{i}.attn.to_out" for i in (0, 1)} | {
        f"transformer_blocks.{i}.attn.to_out.0" for i in (0, 1)
    }


def test_a_distilled_model_is_refused_guidance_before_its_weights_are_read(folders, tmp_path):
    index = json.loads((folders["distilled"] / "model_index.json").read_text())
    assert index["is_distilled"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(PolicyLoadError, match=r"config\.sample\.guidance_scale=4.*distilled"):
        load_policy(tmp_path, guidance_scale=4.0)
    with pytest.raises(PolicyLoadError, match=r"config\.sample\.negative_prompt"):
        load_policy(folders["dev"], negative_prompt=" ")
