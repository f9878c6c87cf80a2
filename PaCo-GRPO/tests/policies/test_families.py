"""What every generator must do: diffusers' images, ratios of 1, gradients.

A new one is a row of FAMILIES in tiny_policies.py, or named on the command line: conftest.py.
"""

import dataclasses
import functools
import re
from types import SimpleNamespace

import pytest
import torch
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from safetensors.torch import load_file
from tiny_policies import (
    FAMILIES,
    VARIANTS,
    build_with_qwen_tokenizer,
    disturb,
    items,
    load,
    picture,
    sampled,
    trained,
    velocity_of,
)

from paco_grpo.options.schema import PretrainedOptions
from paco_grpo.policies import policy_class
from paco_grpo.policies.adapters import add_lora, save_diffusers
from paco_grpo.policies.loading import load_tokenizer, text_length
from paco_grpo.policies.longcat_image import split_quotation
from paco_grpo.sampling.denoise import (
    Draws,
    Sampling,
    rollout,
    transition,
    with_current_log_probs,
)
from paco_grpo.sampling.images import batches_by_key
from paco_grpo.types import Conditioning


@pytest.fixture(params=["tiny", pytest.param("qwen", marks=pytest.mark.slow)])
def any_folder(request, tiny_folder):
    """``tiny_folder``, and with the tokenizer of Qwen's encoders, whose tokens are no bytes."""
    if request.param == "tiny":
        return tiny_folder
    return request.getfixturevalue("qwen_folder")


@pytest.fixture(scope="session")
def qwen_folder(qwen_tokenizer, tmp_path_factory):
    return functools.cache(
        lambda name: build_with_qwen_tokenizer(name, tmp_path_factory.mktemp(name), qwen_tokenizer)
    )


STEPS = 3
TEXT_TOKENS = 40  # less than the policies are loaded with
BY_NAME = pytest.mark.parametrize("name", FAMILIES)
PROMPTS = ("make the star blue", "b", "a circle in place of the star")

ONE_LENGTH = ("one blue star", "two blue cars", "six blue dogs")  # in bytes and in words


def prompts_of(name):
    """Texts of different lengths, where a model can have them in a batch."""
    return ONE_LENGTH if name == "qwen_image_21" else PROMPTS


def sample(policy, chosen, seeds, text_tokens=TEXT_TOKENS, **options):
    """Latents of ``chosen`` in their order, and the batch size of each transformer forward."""
    latents = [None] * len(chosen)
    forwards = []
    hook = policy.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: forwards.append(len([*args, *kwargs.values()][0])), with_kwargs=True
    )
    options = {"noise_level": 0.7} | options
    conditioning_of = policy.encode(chosen, text_tokens).split()  # all at once, as an epoch does
    for batch in batches_by_key([policy.batch_key(item) for item in chosen], 8):
        group = [chosen[i] for i in batch]
        height = group[0].height
        width = group[0].width
        draws = Draws(batch, [seeds[i] for i in batch], height, width)
        conditioning = Conditioning.cat([conditioning_of[i] for i in batch])
        record = rollout(policy, conditioning, draws, Sampling(STEPS, **options))
        for i, row in zip(batch, record.clean_latents, strict=True):
            latents[i] = row
    hook.remove()
    return latents, forwards


@torch.no_grad()
def pixels(policy, latents, item):
    """(3, H, W), for Qwen-Image-2.1 (4, H, W), in [0, 1], before they become bytes."""
    unpacked = policy._unpack(latents[None], item.height, item.width)
    return policy.pipeline.image_processor.postprocess(policy._pixels(unpacked), output_type="pt")[
        0
    ]


def load_pipeline(policy, folder):
    pipe = policy.pipeline_class.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    exec(policy.card_setup, {"pipe": pipe})  # noqa: S102 - as the model card says
    return pipe


def stock_image(pipe, policy, item, seed, text_tokens=TEXT_TOKENS):
    """diffusers' image as ``pixels``."""
    arguments = policy.pipeline_arguments(item)
    if "max_sequence_length" in arguments:
        arguments["max_sequence_length"] = text_tokens
    elif policy.family.startswith("LongCat"):
        pipe.tokenizer_max_length = text_tokens
    with policy.whole_pipeline(item):  # it makes editors' pipelines generate the item's size
        return pipe(
            **arguments,
            num_inference_steps=STEPS,
            output_type="pt",
            generator=[torch.Generator().manual_seed(seed)],
        ).images[0]


def mixed_items(name):
    """Two sizes and lengths of text; for an editor, other shapes and a gray image."""
    chosen = [
        *items(name, "make the star blue", "and now for something longer", size=(32, 64)),
        *items(name, "c"),
    ]
    if chosen[0].num_references:
        other = (64, 128) if name.startswith("flux2") else (30, 60)  # FLUX.2 enlarges nothing
        chosen[1] = dataclasses.replace(
            chosen[1], references=(picture(7, *other), *chosen[1].references[1:])
        )
        gray = picture(8, 96, 32).convert("L")
        references = (gray, *chosen[0].references[1:])
        chosen.append(dataclasses.replace(chosen[0], references=references))
    return chosen


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_images_are_those_of_the_diffusers_pipeline(any_folder, monkeypatch, name, tmp_path):
    """Without noise, with another guidance than in use; then with an adapter, its file in plain
    diffusers.
    """
    # FLUX.2's references may have fewer than 64 pixels here.
    monkeypatch.setattr(Flux2ImageProcessor, "check_image_input", lambda self, image: image)
    true_cfg = "negative_prompt" in (FAMILIES | VARIANTS)[name].options
    options = (
        {"negative_prompt": "blurred", "guidance_scale": 3.0}
        if true_cfg
        else {"guidance_scale": 2.5}
    )
    policy = load(name, any_folder(name), max_sequence_length=72, **options)
    chosen = mixed_items(name)
    seeds = [5, 2**31 + 7, 11, 12]
    assert policy.size_multiple_with(policy.pipeline.vae.config) == policy.size_multiple
    latents, forwards = sample(policy, chosen, seeds)
    groups = [2, 1] + [1] * (len(chosen) - 3)  # one forward each per step, two with true CFG
    if name == "longcat_image_edit":  # references of any shape get the size of the image
        groups = [3, 1]
    elif name.startswith("qwen_image_21"):  # texts of different lengths
        groups = [1] * len(chosen)
    assert sorted(forwards) == sorted(groups * STEPS * (2 if policy.uses_true_cfg else 1))
    pipe = load_pipeline(policy, any_folder(name))
    for item, seed, latent in zip(chosen, seeds, latents, strict=False):
        ours = pixels(policy, latent, item)
        theirs = stock_image(pipe, policy, item, seed)
        assert ours.shape == theirs.shape and ours.shape[1:] == (item.height, item.width)
        assert (ours - theirs).abs().max() <= 1e-5
    silent, _ = sample(policy, chosen, seeds, noise_steps=(1,), noise_level=0.0)
    assert all(torch.equal(a, b) for a, b in zip(silent, latents, strict=True))

    add_lora(policy, rank=3, alpha=6)
    disturb(policy)
    longer = TEXT_TOKENS + 16  # as evaluations may have
    (changed,), _ = sample(policy, chosen[:1], seeds[:1], longer)
    save_diffusers(policy, tmp_path)
    ours = pixels(policy, changed, chosen[0])
    weights = load_file(tmp_path / "pytorch_lora_weights.safetensors")
    for adapter in (str(tmp_path), weights):  # with its metadata, and for a reader that ignores it
        load_lora = getattr(pipe, "load_lora_weights", pipe.transformer.load_lora_adapter)
        load_lora(adapter, use_safetensors=True)
        theirs = stock_image(pipe, policy, chosen[0], seeds[0], longer)
        assert (ours - theirs).abs().max() <= 1e-5
        getattr(pipe, "unload_lora_weights", pipe.transformer.unload_lora)()
    assert (ours - pixels(policy, latents[0], chosen[0])).abs().max() > 1e-2


def scales_of(name):
    """The scale that a family is used with, and one below 1 where that may guide."""
    options = (FAMILIES | VARIANTS)[name].options
    scale = options.get("guidance_scale", 2.5)
    return (scale, 0.6) if "negative_prompt" in options or name == "flux2_klein" else (scale,)


@torch.no_grad()
def ordered_velocity(policy, item, guided):
    """At σ = 0.6; without the layout of latents: sorted as the noise at the same places is."""
    conditioning = policy.encode([item])
    noise = policy.initial_latents([3], *item.size)
    velocity = policy.velocity(noise, torch.tensor([0.6]), conditioning, *item.size, guided)
    return velocity.flatten()[noise.flatten().argsort()]


# The call of LongCat-Image-Edit's pipeline takes no size.
@pytest.mark.parametrize("name", sorted({*FAMILIES, *VARIANTS} - {"longcat_image_edit"}))
def test_velocity_is_that_of_the_pipelines_own_call(tiny_folder, monkeypatch, name):
    """As the generic policy gets it: guided and not, for two sizes and lengths of text."""
    monkeypatch.setattr(Flux2ImageProcessor, "check_image_input", lambda self, image: image)
    for scale in scales_of(name):
        options = {"max_sequence_length": 128, "guidance_scale": scale}
        if "negative_prompt" in (FAMILIES | VARIANTS)[name].options:
            options["negative_prompt"] = "blurred, and dark in one place"
        policy = load(name, tiny_folder(name), **options)
        generic = load(name, tiny_folder(name), policy_name="generic", **options)
        exec(policy.card_setup, {"pipe": generic.pipeline})  # noqa: S102 - as the model card says
        for prompt, size in (("a star", (32, 64)), ("make the star blue, and larger", (64, 64))):
            (item,) = items(name, prompt, size=size)
            with policy.whole_pipeline(item):  # references get the size that the policy gives them
                for guided in (True, False):
                    ours, theirs = (
                        ordered_velocity(driver, item, guided) for driver in (policy, generic)
                    )
                    largest = max(1.0, float(theirs.abs().max()))
                    # A user's weights may amplify rounding; ours hardly do.
                    tolerance = 1e-4 if name == "yours" else 1e-5
                    assert (ours - theirs).abs().max() <= tolerance * largest


@BY_NAME
def test_bfloat16_rounds_weights_and_features_alone(tiny_folder, name):
    """Not the VAE, the latents, or the time and guidance that the transformer gets."""
    folder = tiny_folder(name)
    velocities = []
    scalars = []
    for dtype in (torch.float32, torch.bfloat16):
        policy = load(name, folder, dtype=dtype)
        given = []
        policy.transformer.register_forward_pre_hook(
            lambda _, args, kwargs, given=given: given.extend([*args, *kwargs.values()]),
            with_kwargs=True,
        )
        prompt = prompts_of(name)[0]
        velocities.append(velocity_of(policy, name, prompt).detach())
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        scalars.append([value for value in tensors if value.shape == (1,)])
    assert scalars[0] and len(scalars[0]) == len(scalars[1])
    for one, other in zip(*scalars, strict=True):
        assert other.dtype == torch.float32 and torch.equal(one, other)
    assert policy.encode(items(name, prompt)).prompt_embeds.dtype == torch.bfloat16
    encoders = [p for encoder in policy.text_encoders() for p in encoder.parameters()]
    assert {parameter.dtype for parameter in encoders} == {torch.bfloat16}
    kept = policy.transformer._keep_in_fp32_modules or ()
    for parameter_name, parameter in policy.transformer.named_parameters():
        is_kept = any(part in kept for part in parameter_name.split("."))
        assert parameter.dtype == (torch.float32 if is_kept else torch.bfloat16), parameter_name
    saved = load_file(folder / "vae" / "diffusion_pytorch_model.safetensors")
    for key, tensor in policy.pipeline.vae.state_dict().items():
        assert torch.equal(tensor, saved[key])
    exact, rounded = velocities
    assert rounded.dtype == torch.float32
    assert 1e-4 < (rounded - exact).norm() / exact.norm() < FAMILIES[name].rounding


@pytest.mark.parametrize(
    "prompt",
    ["\N{EGYPTIAN HIEROGLYPH A001}" * 20, "7" * 22],
    ids=["inside a character", "inside the suffix"],
)
def test_qwen_cuts_long_prompts_as_the_pipeline_does(any_folder, prompt):
    folder = any_folder("qwen_image")
    policy = load("qwen_image", folder, max_sequence_length=25)
    (item,) = items("qwen_image", prompt)
    assert policy.encode([item]).prompt_embeds.shape[1] == 25
    (latent,), _ = sample(policy, [item], [3], text_tokens=None)
    pipe = load_pipeline(policy, folder)
    theirs = stock_image(pipe, policy, item, 3, text_tokens=25)
    assert (pixels(policy, latent, item) - theirs).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["flux2", "flux2_klein", "z_image"])
def test_the_length_of_texts_counts_the_template(any_folder, name):
    folder = any_folder(name)
    (item,) = items(name, "make the star blue")
    seen = []
    pretrained = PretrainedOptions(model=str(folder))
    tokenizer = load_tokenizer(pretrained)
    counted = tokenizer(policy_class(pretrained).in_template(tokenizer, item.prompt)).input_ids
    policy = load(name, folder, max_sequence_length=len(counted) + 1)
    policy.pipeline.text_encoder.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    policy.encode([item])
    mask = seen[0]["attention_mask"][0].bool()
    assert seen[0]["input_ids"][0, mask].tolist() == counted and mask.sum() == len(mask) - 1
    options = SimpleNamespace(
        pretrained=pretrained,
        sample=SimpleNamespace(negative_prompt=None),
        max_sequence_length=0,
    )
    assert text_length(options, [item]) >= len(counted) > len(tokenizer(item.prompt).input_ids)
    options.sample.negative_prompt = 70 * "blurred "
    assert text_length(options, [item]) > 70


@pytest.mark.parametrize("name", ["longcat_image", "longcat_image_edit"])
def test_longcat_counts_quoted_characters_one_by_one(any_folder, name):
    """And cuts a longer text, at which the editor's pipeline fails."""
    folder = any_folder(name)
    (item,) = items(name, "a fox's \"star\" and a cat's don't touch")
    pretrained = PretrainedOptions(model=str(folder))
    counted = policy_class(pretrained).count_tokens(load_tokenizer(pretrained), item.prompt)
    padding = []
    for limit in (counted + 2, counted - 2):
        policy = load(name, folder, max_sequence_length=limit, guidance_scale=1.0)
        policy.pipeline.text_encoder.register_forward_pre_hook(
            lambda _, args, kwargs: padding.append(int((kwargs["attention_mask"] == 0).sum())),
            with_kwargs=True,
        )
        policy.encode([item])
    assert padding == [2, 0]
    parts = split_quotation(item.prompt)
    assert "".join(part for part, _ in parts) == item.prompt
    assert [part for part, is_quoted in parts if is_quoted] == ['"star"']


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "flow_sde") for name in FAMILIES] + [("flux", "cps"), ("z_image", "dance_sde")],
)
def test_first_ratio_is_exactly_one(tiny_folder, name, kind):
    policy = trained(name, tiny_folder(name))
    noise = {"noise_steps": (0, 1), "noise_level": 0.7, "transition": kind}
    result = sampled(policy, name, *prompts_of(name), **noise)
    wiped = [
        dataclasses.replace(step, log_prob=torch.zeros(3), mean=step.mean * 0)
        for step in result.noise_steps
    ]
    again = with_current_log_probs(policy, dataclasses.replace(result, noise_steps=wiped))
    for step, new in zip(result.noise_steps, again.noise_steps, strict=True):
        assert torch.equal(new.log_prob, step.log_prob) and torch.equal(new.mean, step.mean)
    for rows in ([0, 1, 2], [2, 0], [1]):
        part = result.select(rows)
        for step in part.noise_steps:
            current = transition(policy, part, step.latents, step.index)
            assert current.mean.requires_grad and not step.log_prob.requires_grad
            ratio = (current.log_prob(step.next_latents) - step.log_prob).exp()
            if len(rows) == 3:
                assert torch.equal(ratio, torch.ones(3))
            # in a micro-batch of another size the last bit of a matrix product may differ
            torch.testing.assert_close(ratio, torch.ones(len(rows)), rtol=0, atol=1e-5)


@BY_NAME
def test_every_adapter_weight_gets_a_gradient(tiny_folder, name):
    """But those whose output the model discards; with true CFG in both forwards."""
    policy = trained(name, tiny_folder(name))
    velocity_of(policy, name, *prompts_of(name)[:2]).square().mean().backward()
    silent = set()
    layers = set()
    for parameter_name, parameter in policy.transformer.named_parameters():
        if parameter.requires_grad:
            layer = parameter_name.split(".lora_")[0]
            layers.add(layer)
            if parameter.grad is None or not parameter.grad.abs().max() > 0:
                silent.add(layer)
    assert silent == {layer for layer in layers if re.fullmatch(FAMILIES[name].discarded, layer)}
    assert len(silent) < len(layers)


def test_a_kept_prefix_gives_the_same_velocity(tiny_folder):
    """At other σ, and for the negative prompt; but the noise steps of a rollout are as in training,
    where gradients pass through it.
    """
    name = "qwen_image_21"
    policy = trained(name, tiny_folder(name))
    (item,) = items(name, "make the star blue")
    arguments = policy.encode([item]), 32, 32
    latents = policy.initial_latents([3], 32, 32)
    sigmas = (torch.tensor([0.9]), torch.tensor([0.3]))
    with torch.no_grad():
        whole = [policy.velocity(latents, sigma, *arguments) for sigma in sigmas]
        forwards = []
        hook = policy.transformer.proj_out.register_forward_hook(
            lambda _, args, output: forwards.append(output.shape[1])
        )
        with policy.keeping_prefix():
            kept = [policy.velocity(latents, sigma, *arguments) for sigma in sigmas]
        again = policy.velocity(latents, sigmas[0], *arguments)
        hook.remove()
    torch.testing.assert_close(kept, whole, rtol=0, atol=1e-5)
    assert torch.equal(again, whole[0]) and forwards[2:4] == [4, 4] and min(forwards[4:]) > 4
