"""Pipelines that nobody wrote a policy for: native families, driven through their own calls."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from tiny_policies import FAMILIES, disturb, draw, items, load, picture, trainable_parameters

from paco_grpo.options.schema import PretrainedOptions
from paco_grpo.policies import PolicySettings, policy_class
from paco_grpo.policies.adapters import add_lora, save_diffusers
from paco_grpo.policies.base import PolicyLoadError
from paco_grpo.policies.generic import generic_policy
from paco_grpo.policies.loading import pipeline_defaults
from paco_grpo.types import Conditioning

SIZE = (64, 32)


@pytest.fixture(autouse=True)
def small_references(monkeypatch):
    """FLUX.2's may have fewer than 64 pixels here."""
    monkeypatch.setattr(Flux2ImageProcessor, "check_image_input", lambda self, image: image)


# Qwen's and LongCat's editors enlarge references to a megapixel, or choose the size themselves.
NAMES = (
    "flux",
    "flux_kontext",
    "flux2_klein",
    "krea2",
    "longcat_image",
    "qwen_image",
    "stable_diffusion_3",
    "z_image",
)
BY_NAME = pytest.mark.parametrize("name", NAMES)


def load_generic(name, folder, **options):
    options = {"max_sequence_length": 40} | FAMILIES[name].options | options
    pipeline = DiffusionPipeline.from_pretrained(folder)
    return generic_policy(type(pipeline))(pipeline, PolicySettings(**options))


def options_of(name):
    """A negative text that is not empty, and another scale than in use."""
    if "negative_prompt" in FAMILIES[name].options:
        return {"negative_prompt": "dull and gray", "guidance_scale": 2.6}
    return {"guidance_scale": 2.2}


def plain_image(pipeline, policy, item, seed, num_steps=3):
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(seed)
    arguments = policy.pipeline_arguments(item)
    return pipeline(**arguments, num_inference_steps=num_steps, generator=generator).images[0]


def levels(a, b):
    return int(np.abs(np.asarray(a, int) - np.asarray(b, int)).max())


def velocities(policy, chosen, sigma, guided=True, seeds=(3, 4, 5)):
    """One forward for ``chosen``, which have one size."""
    conditioning = policy.encode(chosen, 36)
    latents = policy.initial_latents(seeds[: len(chosen)], *chosen[0].size)
    return policy.velocity(latents, torch.tensor(sigma), conditioning, *chosen[0].size, guided)


@BY_NAME
def test_images_are_those_of_the_pipeline(tiny_folder, tmp_path, name):
    """Also with an adapter, by its file in the plain pipeline; the user's pipeline stays whole."""
    policy = load_generic(name, tiny_folder(name), **options_of(name))
    before = dict(vars(policy.pipeline))
    first, second = items(name, "a blue star", "two cars and a tree", size=SIZE)
    tall = dataclasses.replace(second, height=96)
    images = []
    for item, seed in ((first, 5), (tall, 2**31 + 7)):
        (image,) = draw(policy, [item], [seed], *item.size, 3)
        images.append(image)
        plain = DiffusionPipeline.from_pretrained(tiny_folder(name))
        assert levels(image, plain_image(plain, policy, item, seed)) <= 1
    assert vars(policy.pipeline) == before
    assert levels(images[0], plain_image(policy.pipeline, policy, first, 5)) <= 1

    add_lora(policy, rank=3, alpha=6)
    disturb(policy)
    (image,) = draw(policy, [first], [5], *SIZE, 3)
    save_diffusers(policy, tmp_path)
    load_lora = getattr(plain, "load_lora_weights", plain.transformer.load_lora_adapter)
    load_lora(str(tmp_path), use_safetensors=True)
    assert levels(image, plain_image(plain, policy, first, 5)) <= 1
    assert levels(image, images[0]) > 10


@pytest.mark.parametrize("name", [name for name in NAMES if name != "longcat_image"])
@pytest.mark.parametrize("guided", [True, False])
def test_velocities_and_gradients_are_those_of_the_native_policy(tiny_folder, name, guided):
    """At two σ in one forward; the generic one recomputes its activations.

    LongCat's call takes no length of the text.
    """
    results = []
    chosen = items(name, "a blue star", "two red car", size=SIZE)
    for loaded in (load, load_generic):
        policy = loaded(name, tiny_folder(name), **options_of(name))
        torch.manual_seed(0)
        targets = results[0][2] if results else policy.lora_targets
        add_lora(policy, rank=3, alpha=6, targets=targets)
        disturb(policy)
        if results:
            policy.transformer.enable_gradient_checkpointing()
        velocity = velocities(policy, chosen, [0.8, 0.3], guided)
        velocity.square().mean().backward()
        gradients = [p.grad for p in trainable_parameters(policy) if p.grad is not None]
        results.append((velocity.detach(), gradients, targets))
    (native, native_gradients, _), (generic, gradients, _) = results
    assert native.std() > 0.01
    torch.testing.assert_close(generic, native, rtol=1e-5, atol=1e-5)
    assert len(gradients) == len(native_gradients)
    torch.testing.assert_close(gradients, native_gradients, rtol=1e-3, atol=1e-6)


@BY_NAME
def test_a_batch_gives_what_each_of_its_samples_gives_alone(tiny_folder, name):
    """Texts of different lengths and several σ; and each alone differs from the others."""
    policy = load_generic(name, tiny_folder(name), **options_of(name))
    prompts = ("a blue star", "b", "two red car")
    chosen = items(name, *prompts, size=SIZE)
    for sigma in ([0.8, 0.8, 0.8], [0.8, 0.3, 0.8]):
        together = velocities(policy, chosen, sigma)
        for row, item in enumerate(chosen):
            alone = velocities(policy, [item], sigma[row : row + 1], seeds=(3 + row,))
            torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-5)
        swapped = velocities(policy, chosen[::-1], sigma)
        assert (swapped - together).abs().amax(dim=(1, 2))[[0, 2]].min() > 1e-3
    rows = policy.encode(chosen)
    parts = Conditioning.cat([rows.select([2]), rows.select(torch.tensor([True, False, False]))])
    assert [recording.item.prompt for recording in parts.recordings] == [prompts[2], prompts[0]]


def test_samples_share_a_call_only_where_all_shapes_agree(tiny_folder):
    policy = load_generic("qwen_image", tiny_folder("qwen_image"))
    calls = []
    policy.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    chosen = items("qwen_image", "a blue star", "b", "two red car", size=SIZE)
    velocities(policy, chosen, [0.6, 0.6, 0.6])
    assert calls == [2, 2, 1, 1]  # with and without the prompt
    keys = [policy.batch_key(item) for item in chosen]
    assert keys[0] == keys[2] != keys[1]
    calls.clear()
    velocities(policy, chosen[::2], [0.6, 0.5], guided=False)
    assert calls == [1, 1]
    editor = load_generic("flux_kontext", tiny_folder("flux_kontext"))
    (item,) = items("flux_kontext", "a blue star", size=SIZE)
    assert editor.batch_key(item) != editor.batch_key(item)


def test_policies_in_threads_do_not_meet(tiny_folder):
    """Two of one class, with another text, size and guidance."""
    folder = tiny_folder("stable_diffusion_3")
    tasks = []
    for prompt, size, scale in (("a blue star", (64, 32), 2.0), ("red", (32, 96), 4.0)):
        policy = load_generic("stable_diffusion_3", folder, guidance_scale=scale)
        tasks.append((policy, items("stable_diffusion_3", prompt, size=size), [7], *size, 4))
    expected = [draw(*task)[0] for task in tasks]
    with ThreadPoolExecutor(2) as threads:
        drawn = [threads.submit(draw, *task) for task in tasks * 3]
    for image, same in zip([future.result()[0] for future in drawn], expected * 3, strict=True):
        assert levels(image, same) == 0


@pytest.mark.parametrize("name", ["qwen_image", "z_image", "stable_diffusion_3"])
def test_guidance_is_that_of_the_call_or_none(tiny_folder, name):
    """A negative prompt of None means none, whatever the pipeline does then."""
    folder = tiny_folder(name)
    (item,) = items(name, "a blue star", size=SIZE)
    guided = load_generic(name, folder, **options_of(name))
    plain = load_generic(name, folder, negative_prompt=None)
    assert guided.uses_true_cfg and not plain.uses_true_cfg
    with_it, without = (velocities(guided, [item], [0.6], flag) for flag in (True, False))
    torch.testing.assert_close(velocities(plain, [item], [0.6]), without, rtol=0, atol=1e-5)
    assert (with_it - without).abs().max() > 1e-3
    other = load_generic(name, folder, **options_of(name) | {"negative_prompt": "a red car"})
    assert (velocities(other, [item], [0.6]) - with_it).abs().max() > 1e-3


def test_offloaded_models_and_lower_precision(tiny_folder):
    """The VAE decodes in float32, and what is recorded has the policy's precision."""
    folder = tiny_folder("flux_kontext")
    (item,) = items("flux_kontext", "a blue star", size=SIZE)
    policy = load_generic("flux_kontext", folder)
    (image,) = draw(policy, [item], [5], *SIZE, 3)
    policy.offload(text_encoders=True, vae=True)
    other = dataclasses.replace(item, prompt="two red car", references=(picture(9, *SIZE),))
    assert levels(draw(policy, [other], [5], *SIZE, 3)[0], image) > 5
    assert levels(draw(policy, [item], [5], *SIZE, 3)[0], image) == 0
    rounded = load_generic("flux_kontext", folder, dtype=torch.bfloat16)
    latents = policy.initial_latents([3], *SIZE)  # torch 2.8 draws other noise in bfloat16
    both = []
    for driver in (policy, rounded):
        sigma = torch.tensor([0.6])
        both.append(driver.velocity(latents, sigma, driver.encode([item], 36), *SIZE))
    error = both[1] - both[0]
    assert error.dtype == torch.float32 and 1e-4 < error.abs().mean() < 0.05


def test_what_cannot_be_driven_is_refused_in_a_sentence():
    with pytest.raises(PolicyLoadError, match="LongCatImageEditPipeline .* no height and no width"):
        generic_policy(diffusers.LongCatImageEditPipeline)
    with pytest.raises(PolicyLoadError, match="StableDiffusionPipeline .* no transformer"):
        generic_policy(diffusers.StableDiffusionPipeline)
    with pytest.raises(PolicyLoadError, match="ChromaPipeline .* vae/config.json has none of"):
        generic_policy(diffusers.ChromaPipeline).size_multiple_with({"latent_channels": 16})


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("scheduler", ["diffusers", "DDIMScheduler"], "no FlowMatchEulerDiscreteScheduler"),
        ("transformer", [None, None], "its transformer takes no LoRA"),
        ("vae", ["transformers", "CLIPTextModel"], "it has no VAE"),
    ],
)
def test_parts_that_cannot_be_trained_are_refused_before_weights_are_loaded(
    tmp_path, tiny_folder, part, value, message
):
    index = json.loads((tiny_folder("flux") / "model_index.json").read_bytes())
    (tmp_path / "model_index.json").write_text(json.dumps(index | {part: value}))
    with pytest.raises(PolicyLoadError, match=f"FluxPipeline cannot be trained: .*{message}"):
        policy_class(PretrainedOptions(model=str(tmp_path)))


def test_the_class_knows_what_is_asked_before_weights_are_loaded():
    """As the native ones, where their calls tell."""
    flux = generic_policy(diffusers.FluxPipeline)
    assert (flux.has_true_cfg, flux.edits_images, flux.text_limit) == (False, False, 512)
    kontext = generic_policy(diffusers.FluxKontextPipeline)
    assert (kontext.edits_images, kontext.needs_image) == (True, False)
    assert generic_policy(diffusers.Kandinsky5I2IPipeline).needs_image
    assert generic_policy(diffusers.QwenImagePipeline).has_true_cfg
    assert generic_policy(diffusers.CogView4Pipeline).text_limit == 1024
    assert not generic_policy(diffusers.LongCatImagePipeline).cuts_text
    assert pipeline_defaults(flux).guidance_scale == 3.5
    assert pipeline_defaults(generic_policy(diffusers.HunyuanImagePipeline)).guidance_scale == 3.25
    assert pipeline_defaults(generic_policy(diffusers.Flux2KleinKVPipeline)).guidance_scale == 1


def test_the_time_at_any_sigma_does_not_depend_on_earlier_schedules(tiny_folder):
    """A resumed run has made fewer of them."""
    folder = tiny_folder("stable_diffusion_3")
    policies = [load_generic("stable_diffusion_3", folder) for _ in range(2)]
    policies[1].sigmas(7, *SIZE)
    sigmas = np.linspace(0.05, 0.95, 60).tolist()
    times = [[policy._time(sigma, SIZE) for sigma in sigmas] for policy in policies]
    assert times[0] == times[1] == pytest.approx(np.multiply(sigmas, 1000))
