"""Sizes, grouping, encoding and errors of the policies that edit images."""

import logging

import numpy as np
import pytest
import torch
from tiny_policies import EDITORS, items, load, picture
from tiny_qwen_edit import SCHEDULER

from paco_grpo.policies import PolicyLoadError, load_policy
from paco_grpo.sampling.images import at_size
from paco_grpo.types import Item


def size_of(item, resolution, mode, policy):
    sized = at_size(item, resolution, mode, policy)
    return sized.height, sized.width


@pytest.fixture(params=EDITORS)
def name(request):
    return request.param


def edit(width, height, size=(None, None)):
    return Item(0, "x", *size, image=picture(0, height, width))


def test_sizes_are_rounded_as_the_pipelines_do_with_one_log_line(tiny_folder, caplog):
    kontext, qwen = (load(name, tiny_folder(name)) for name in EDITORS)
    assert kontext.size_multiple == qwen.size_multiple == 8
    with caplog.at_level(logging.INFO):
        # FluxKontextPipeline: round(sqrt(area·ratio)), then down; QwenImageEditPipeline: to the nearest multiple of 32
        assert size_of(edit(150, 100), 100, "aspect", kontext) == (80, 120)
        assert size_of(edit(150, 100), 100, "aspect", qwen) == (96, 128)
        assert size_of(edit(150, 100), 100, "exact", qwen) == (96, 128)
        assert size_of(edit(160, 96), 100, "exact", qwen) == (64, 128)
        size_of(edit(150, 100), 100, "aspect", kontext)
    assert caplog.text.count("item of 100x150 is drawn at 80x120 (multiple of 8)") == 1
    assert caplog.text.count("item of 100x150 is drawn at 96x128") == 1
    for policy in (kontext, qwen):  # an item's own size: down to the multiple, as both pipelines do
        assert size_of(edit(150, 100, (47, 70)), 100, "exact", policy) == (40, 64)
    assert size_of(edit(150, 100, (40, 80)), 100, "aspect", kontext) == (64, 136)
    assert kontext.fit_area(1024**2, 3 / 2) == (832, 1248)  # 836 and 1254 before rounding
    assert qwen.fit_area(1024**2, 3 / 2) == (832, 1248)


def test_reference_size(tiny_folder, name, caplog):
    policy = load(name, tiny_folder(name))
    # the size that is drawn where the shapes agree (to rounding), its area in the image's shape where they do not
    assert policy.reference_size(edit(600, 400, (64, 96))) == (64, 96)
    assert (
        policy.reference_size(edit(400, 400, (64, 96))) == {"flux_kontext": (72, 72), "qwen_image_edit": (64, 64)}[name]
    )
    assert policy.reference_size(edit(128, 64)) == (64, 128)  # no size: the image's own
    for shape in ((150, 100), (100, 150), (640, 480), (1000, 563), (77, 77)):  # a size that came from the image's shape
        item = edit(*shape)
        size = size_of(item, 384, "aspect", policy)
        height, width = policy.reference_size(edit(*shape, size))
        assert abs(height - size[0]) <= 32 and abs(width - size[1]) <= 32
        assert abs(np.log(width / height * item.image.height / item.image.width)) < 0.06
    with caplog.at_level(logging.INFO):
        conditioning = policy.encode([edit(600, 400, (64, 96)), edit(600, 400, (64, 96))])
    assert caplog.text.count("reference image of 400x600 is read at 64x96") == 1
    assert conditioning.reference_grid.tolist() == [[8, 12]] * 2 and conditioning.reference.shape == (2, 96, 16)
    keys = {policy.batch_key(edit(w, h, (64, 96))) for w, h in ((600, 400), (300, 200), (400, 400))}
    assert len(keys) == 2


def test_references_of_different_size_are_kept_apart(tiny_folder, name):
    policy = load(name, tiny_folder(name))
    chosen = [edit(64, 64, (64, 64)), edit(256, 64, (64, 64)), edit(64, 64, (64, 64))]
    conditioning = policy.encode(chosen)
    assert len({policy.batch_key(item) for item in chosen}) == 2
    latents, sigma = policy.initial_latents([1, 2, 3], 64, 64), torch.full((3,), 0.5)
    with pytest.raises(ValueError, match="cannot share a forward.*batch_key"):
        policy.velocity(latents, sigma, conditioning, 64, 64)
    # beside a longer reference a shorter one is padded; what it is padded with is never read
    wide = edit(70, 64, (40, 40)), edit(64, 64, (64, 64))
    alone, padded = policy.encode(wide[:1]), policy.encode(wide).select([0])
    assert padded.reference.shape[1] > alone.reference.shape[1]
    one = policy.velocity(latents[:1], sigma[:1], alone, 64, 64)
    torch.testing.assert_close(policy.velocity(latents[:1], sigma[:1], padded, 64, 64), one, rtol=0, atol=1e-5)


def test_everything_is_encoded_once(tiny_folder, name, monkeypatch):
    policy = load(name, tiny_folder(name))
    calls = {"text": 0, "vae": 0}

    def count(module, method, key):
        original = getattr(module, method)

        def counted(*args, **kwargs):
            calls[key] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, method, counted)

    count(policy.text_encoders()[-1], "forward", "text")
    count(policy.pipeline.vae, "encode", "vae")
    first = policy.encode(items(name, "a", "b"))
    # Kontext's text does not see the image; Qwen's does, and true CFG adds the negative prompt for each image
    assert calls == {"text": 2 if name == "flux_kontext" else 4, "vae": 2}
    second = policy.encode([*items(name, "a", "b"), *items(name, "a")])
    assert calls == {"text": 2 if name == "flux_kontext" else 4, "vae": 2}
    assert torch.equal(first.prompt_embeds, second.prompt_embeds[:2]) and torch.equal(
        first.reference, second.reference[:2]
    )
    policy.encode(items(name, "a", size=(64, 64), reference=(32, 32)))
    assert calls["vae"] == 3  # the same picture at another size
    policy.encode(items(name, "c"))
    assert calls["vae"] == 3 and calls["text"] >= 3


def test_text_and_image_reach_the_velocity(tiny_folder, name):
    policy = load(name, tiny_folder(name))

    def velocity(item):
        latents = policy.initial_latents([1], 32, 32)
        return policy.velocity(latents, torch.tensor([0.5]), policy.encode([item]), 32, 32)

    base = velocity(Item(0, "a", 32, 32, image=picture(1)))
    assert (velocity(Item(0, "another", 32, 32, image=picture(1))) - base).abs().max() > 1e-4
    assert (velocity(Item(0, "a", 32, 32, image=picture(2))) - base).abs().max() > 1e-4
    assert torch.equal(velocity(Item(5, "a", 32, 32, image=picture(1))), base)


def test_errors_and_warnings(tiny_folder, name, caplog):
    policy = load(name, tiny_folder(name))
    with pytest.raises(ValueError, match="item 4 has no reference image"):
        policy.encode([Item(4, "x", 32, 32)])
    if name == "flux_kontext":
        with pytest.raises(PolicyLoadError, match="sample.negative_prompt=' '.*leave it at None"):
            load_policy(tiny_folder(name), negative_prompt=" ")
        return
    with pytest.raises(ValueError, match="between 1 and 1024"):
        load(name, tiny_folder(name), max_sequence_length=1025)
    with pytest.raises(ValueError, match="num_steps = 1.*needs 2"):
        policy.sigmas(1, 32, 32)
    for options in ({"negative_prompt": None}, {"guidance_scale": 1.0}):
        caplog.clear()
        assert not load(name, tiny_folder(name), **options).guided
        assert "no true CFG: config.sample.guidance_scale" in caplog.text
    caplog.clear()
    long = policy.encode(items(name, "x" * 30))
    assert "cut to config.max_sequence_length=24 of its 30 tokens" in caplog.text
    assert torch.equal(long.prompt_embeds, policy.encode(items(name, "x" * 24)).prompt_embeds)


def test_qwen_schedule(tiny_folder):
    policy = load("qwen_image_edit", tiny_folder("qwen_image_edit"))
    sigmas = policy.sigmas(10, 64, 96)
    assert sigmas.shape == (11,) and sigmas[0] == 1 and sigmas[-1] == 0 and bool((sigmas.diff() < 0).all())
    # the shift of its own scheduler, from the drawn tokens alone, stretched so that the last step starts at 0.02
    t = np.linspace(1, 0.1, 10)
    slope = (SCHEDULER["max_shift"] - SCHEDULER["base_shift"]) / (8192 - 256)
    mu = slope * (8 * 12 - 256) + SCHEDULER["base_shift"]
    shifted = np.exp(mu) / (np.exp(mu) + 1 / t - 1)
    expected = 1 - (1 - shifted) * (1 - 0.02) / (1 - shifted[-1])
    np.testing.assert_allclose(sigmas[:-1].numpy(), expected, rtol=1e-5)


def test_low_precision_runs_and_returns_float32(tiny_folder, name):
    low = load(name, tiny_folder(name), dtype=torch.bfloat16)
    chosen = items(name, "a", "bc")
    arguments = low.initial_latents([1, 2], 32, 32), torch.tensor([0.5, 0.5])
    velocity = low.velocity(*arguments, low.encode(chosen), 32, 32)
    assert velocity.dtype == torch.float32
    reference = load(name, tiny_folder(name))
    exact = reference.velocity(*arguments, reference.encode(chosen), 32, 32)
    assert 0 < (velocity - exact).abs().max() < 0.5
    assert low.decode(arguments[0], 32, 32)[0].size == (32, 32)
