"""Sizes, grouping, encoding and errors of the policies that edit images."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from tiny_policies import EDITORS, items, load, picture

from paco_grpo.policies import PolicyLoadError, PolicySettings, load_policy
from paco_grpo.sampling.images import at_size
from paco_grpo.types import Item

BY_NAME = pytest.mark.parametrize("name", EDITORS)


@pytest.fixture
def policy(tiny_folder, name):
    return load(name, tiny_folder(name))


def edit(width, height, size=(None, None)):
    return Item(0, "x", *size, references=(picture(0, height, width),))


@pytest.fixture(scope="module")
def at_published_size(tiny_folder):
    """Editors whose tokens have the published models' 16 x 16 pixels."""
    policies = {}
    for name in (*EDITORS, "qwen_image_edit_plus", "flux2"):
        policies[name] = load(name, tiny_folder(name))
        policies[name].size_multiple = 16
        policies[name].size_step = max(policies[name].size_step, 16)
    return policies


@pytest.mark.parametrize("name", [*EDITORS, "qwen_image_edit_plus", "flux2"])
@settings(max_examples=60)
@given(st.integers(200, 5000), st.floats(1 / 3, 3), st.integers(256, 1024))
@example(832, 1216 / 832, 384)
def test_an_edit_has_the_shape_and_the_tokens_of_its_reference(
    at_published_size, name, height, aspect, resolution
):
    """Else it would be shifted or stretched against the reference, which a reward for keeping the
    rest sees.
    """
    policy = at_published_size[name]
    image = SimpleNamespace(height=height, width=round(aspect * height))
    image.size = image.width, image.height
    unsized = SimpleNamespace(height=None, width=None, images=(image,))
    size = policy.size_like(unsized, resolution)
    sized = SimpleNamespace(height=size[0], width=size[1], images=(image,))
    assert policy.reference_size(image, sized) == size
    assert not any(side % policy.size_step for side in size)
    step = math.log(min(size) / (min(size) - policy.size_step))
    assert abs(math.log(size[1] / size[0] / (image.width / image.height))) <= step / 2 + 1e-6
    assert abs(math.log(size[0] * size[1] / resolution**2)) <= 3 * step
    if name == "flux2":
        assert size[0] * size[1] <= 1024**2  # the pipeline would scale the reference down


@BY_NAME
def test_reference_size(policy, name):
    # the generated size if the shapes agree up to rounding, else its area in the image's shape
    def size_read(item):
        return policy.reference_size(item.image, item)

    assert size_read(edit(600, 400, (64, 96))) == (64, 96)
    assert size_read(edit(400, 400, (64, 96))) == ((72, 72) if name == "flux_kontext" else (64, 64))
    if name == "flux_kontext":  # 79.6 pixels a side
        assert size_read(edit(400, 400, (72, 88))) == (80, 80)
    assert size_read(edit(128, 64)) == (64, 128)  # no size: the image's own
    for mode in ("aspect", "exact"):
        sized = at_size(edit(128, 64), 64, mode, policy)
        assert sized.width / sized.height == pytest.approx(2, rel=0.2)
    conditioning = policy.encode([edit(600, 400, (64, 96)), edit(600, 400, (64, 96))])
    assert conditioning.reference_grid.tolist() == [
        [[8, 12]]
    ] * 2 and conditioning.reference.shape == (2, 96, 16)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("flux2", (64, 192)), ("flux2_klein", (64, 192)), ("qwen_image_edit_plus", (160, 80))],
)
def test_which_of_several_references_gives_the_shape(tiny_folder, name, shape):
    """The first or the last one, as in diffusers' pipelines without a height and a width."""
    policy = load(name, tiny_folder(name))
    pictures = (picture(1, 64, 192), picture(2, 96, 96), picture(3, 160, 80))
    height, width = policy.size_like(Item(0, "x", references=pictures), 192)
    assert height / width == pytest.approx(shape[0] / shape[1], rel=0.1)


@pytest.mark.parametrize("name", [*EDITORS, "flux2_klein"])
def test_references_of_different_size_or_number_do_not_share_a_forward(policy, name):
    chosen = [edit(64, 64, (64, 64)), edit(256, 64, (64, 64))]
    if policy.several_images:
        chosen += [
            Item(2, "x", 64, 64, references=(picture(1, 64, 64), picture(2, 64, 64))),
            Item(3, "x", 64, 64),
        ]
    assert len({policy.batch_key(item) for item in chosen}) == len(chosen)
    conditioning = policy.encode(chosen)
    sigma = torch.full((len(chosen),), 0.5)
    latents = policy.initial_latents(range(len(chosen)), 64, 64)
    with pytest.raises(ValueError, match="batch_key"):
        policy.velocity(latents, sigma, conditioning, 64, 64)
    for row, item in enumerate(chosen):  # padding behind a row's own references is never read
        parts = policy.encode([item]), conditioning.select([row])
        velocities = [policy.velocity(latents[:1], sigma[:1], part, 64, 64) for part in parts]
        torch.testing.assert_close(*velocities, rtol=0, atol=1e-5)


@BY_NAME
def test_everything_is_encoded_once(policy, name):
    calls = {"text": 0, "vae": 0}
    policy.text_encoders()[-1].register_forward_pre_hook(
        lambda *_: calls.update(text=calls["text"] + 1)
    )
    policy.pipeline.vae.encoder.register_forward_pre_hook(
        lambda *_: calls.update(vae=calls["vae"] + 1)
    )
    # Kontext's text does not see the image; Qwen's does, and true CFG adds the negative prompt for
    # each image
    texts = 2 if name == "flux_kontext" else 4
    reads = []
    first = policy.encode(items(name, "a", "b"))
    assert calls == {"text": texts, "vae": 2}
    second = policy.encode([*items(name, "a", "b"), *items(name, "a")])
    assert calls == {"text": texts, "vae": 2}
    assert torch.equal(first.prompt_embeds, second.prompt_embeds[:2])
    assert torch.equal(first.reference, second.reference[:2])
    policy.encode(items(name, "a"), 40)
    assert calls == {"text": texts * 3 // 2, "vae": 2}  # a text of another length
    policy.encode(items(name, "a", size=(64, 64), reference=(32, 32)))
    assert calls["vae"] == 3  # the same picture at another size
    for size in ((32, 64), (64, 32)):
        policy.encode([Item(0, "a", *size, references=(Image.new("RGB", size[::-1]),))])
    assert calls["vae"] == 5  # the same bytes in another shape
    policy.encode([Item(0, "x", 32, 32, references=(lambda: reads.append(1) or picture(1),))])
    assert len(reads) == 1


def test_image_tokens_have_their_rows_and_columns(tiny_folder):
    """In Qwen's text encoder, by what transformers counts as an image (M-RoPE)."""
    policy = load("qwen_image_edit", tiny_folder("qwen_image_edit"))
    encoder = policy.pipeline.text_encoder
    seen = []
    for module in (encoder, encoder.model.language_model):
        module.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True
        )
    policy.encode(items("qwen_image_edit", "make it blue", size=(32, 96)))
    text, language = seen[:2]
    is_image = text["input_ids"] == encoder.config.image_token_id
    positions, _ = encoder.model.get_rope_index(
        text["input_ids"],
        is_image.int(),
        text["image_grid_thw"],
        attention_mask=text["attention_mask"],
    )
    assert torch.equal(language["position_ids"], positions)
    times, rows, columns = positions[:, is_image]
    assert len(times.unique()) == 1 and len(rows.unique()) < len(columns.unique())


@pytest.mark.parametrize("name", ["flux_kontext", "flux2"])
def test_embedded_guidance_takes_no_negative_prompt(tiny_folder, name):
    with pytest.raises(PolicyLoadError, match=r"config\.sample\.negative_prompt"):
        load_policy(tiny_folder(name), PolicySettings(negative_prompt=" "))


def test_qwen_warns_of_half_a_cfg(tiny_folder, caplog):
    name = "qwen_image_edit"
    assert load(name, tiny_folder(name)).uses_true_cfg and not caplog.text
    for options in ({"negative_prompt": None}, {"guidance_scale": 1.0}):
        caplog.clear()
        assert not load(name, tiny_folder(name), **options).uses_true_cfg
        assert "config.sample.guidance_scale" in caplog.text
