"""The parts of the toy Qwen-Image-Edit: a VAE trained as for stills, and a text encoder read as the pipeline reads it."""

import numpy as np
import pytest
import torch
from diffusers import QwenImageEditPipeline
from PIL import Image

from paco_toy.bases import qwen_edit
from paco_toy.bases.edit_batches import VALUES, draw_edits, draw_pixels
from paco_toy.bases.panels import PanelCache
from paco_toy.bases.qwen_text import (
    NO_INSTRUCTION,
    SceneReader,
    new_editor_processor,
    new_text_encoder,
    prompt_template,
)
from paco_toy.bases.qwen_vae import new_qwen_vae, normalised_latents, stills_only, train_decoder, train_qwen_vae
from paco_toy.world import SHAPES


@pytest.fixture(scope="module")
def panels():
    return {side: PanelCache(side, 2, 0) for side in (16, 32, 64)}


@pytest.fixture(scope="module")
def pipe():
    processor = new_editor_processor()
    reader = SceneReader(new_text_encoder(processor.tokenizer, 0), processor)
    return qwen_edit.assemble(new_qwen_vae(0).eval(), reader, 0)


def test_stills_are_encoded_and_decoded_as_the_class_does():
    vae = new_qwen_vae(3).eval()
    x = torch.randn(2, 3, 1, 32, 32)

    def through():
        vae.zero_grad()
        latents = vae.quant_conv(vae.encoder(x)).chunk(2, dim=1)[0]
        y = vae.decoder(vae.post_quant_conv(latents))
        y.square().mean().backward()
        return y.detach(), [p.grad.clone() for p in vae.parameters() if p.grad is not None]

    expected, gradients = through()
    with stills_only(vae):
        y, faster = through()
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    assert len(faster) == len(gradients)
    for ours, theirs in zip(faster, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(vae(x, return_dict=True).sample, expected.clamp(-1, 1), rtol=1e-4, atol=1e-5)


def test_a_latent_depends_on_its_neighbourhood_alone():
    vae = new_qwen_vae(3).eval()
    x = torch.randn(1, 3, 1, 64, 64)
    other = x.clone()
    other[..., 48:] = 0
    with torch.no_grad():
        a, b = (vae.encode(v).latent_dist.mode() for v in (x, other))
    # All but the last column of the encoder's field of view, about 40 px; attention would reach everywhere.
    far = slice(0, 2)
    torch.testing.assert_close(a[..., far], b[..., far], rtol=0, atol=1e-6)
    assert (a - b).abs().max() > 1e-2


def test_the_decoder_can_go_on_while_latents_keep_their_meaning(panels):
    vae = new_qwen_vae(0)
    train_qwen_vae(vae, panels, 1.0, 0)
    known = [t.clone() for t in (*vae.encoder.state_dict().values(), *vae.quant_conv.state_dict().values())]
    decoder = vae.decoder.conv_in.weight.clone()
    train_decoder(vae, panels, 0.5, 0)
    now = [*vae.encoder.state_dict().values(), *vae.quant_conv.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(known, now, strict=True))
    assert not torch.equal(decoder, vae.decoder.conv_in.weight)
    assert vae.encoder.conv_in.weight.requires_grad
    x = torch.from_numpy(panels[32].draw_grids(*np.indices((4, 4)), np.random.default_rng(0))).permute(0, 3, 1, 2)
    z = normalised_latents(vae, x / 127.5 - 1)
    assert z.shape == (4, 4, 16, 16) and 0.5 < z.std() < 2 and np.all(np.array(vae.config.latents_std) > 0)


def test_every_word_is_one_token_and_the_scene_comes_right_after_what_is_dropped():
    tokenizer = new_editor_processor().tokenizer
    template, dropped = prompt_template()
    for shape in SHAPES:
        for value in VALUES:
            tokens = tokenizer.tokenize(template.format(f"make the {shape} {value}"))
            assert tokens[dropped] == "<|vision_start|>" and tokens[dropped - 2 : dropped] == ["user", "Ċ"]
            assert tokens[dropped + 3 : -5] == ["make", "Ġthe", f"Ġ{shape}", f"Ġ{value}"]
    assert tokenizer.tokenize(NO_INSTRUCTION) == ["Ġ"]
    assert tokenizer.decode(tokenizer("any äöü 漢字").input_ids) == "any äöü 漢字"  # nothing is unknown


def test_the_reader_sees_what_the_pipeline_sees(pipe, panels):
    reader, rng = SceneReader(pipe.text_encoder.eval(), pipe.processor), np.random.default_rng(0)
    batch = draw_edits(3, rng)
    pixels = draw_pixels(batch, panels[32])[0]
    for texts in (batch.instructions, [NO_INSTRUCTION] * 3):
        with torch.no_grad():
            ours = reader(pixels, texts)
            theirs = [
                pipe.encode_prompt([t], image=[Image.fromarray(p)])[0] for t, p in zip(texts, pixels, strict=True)
            ]
        torch.testing.assert_close(ours, torch.cat(theirs), rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_pipelines_own_velocity_against_the_noise_minus_the_target(pipe, panels, monkeypatch):
    """With a transformer that knows the answer the loss is 0: order of tokens, times and sign are the pipeline's."""
    seen = {}

    def knowing(*, hidden_states, timestep, encoder_hidden_states, img_shapes, return_dict):
        seen.update(hidden=hidden_states, t=timestep, shapes=img_shapes, text=encoder_hidden_states)
        half = hidden_states.shape[1] // 2
        noisy, t = hidden_states[:, :half], timestep[:, None, None]
        return (torch.cat([(noisy - tokens) / t, torch.zeros_like(noisy)], dim=1),)

    rng = np.random.default_rng(1)
    batch = draw_edits(6, rng, departure=0.0)
    cache = qwen_edit.LatentCache(lambda x: normalised_latents(pipe.vae, x).detach(), {16: panels[16]}, 0)
    x0 = cache.grids(16, batch.after, batch.views, batch.variants)
    tokens = pipe._pack_latents(x0, *x0.shape)
    monkeypatch.setattr(pipe, "transformer", knowing)
    text = torch.zeros(6, 15, 96)
    assert qwen_edit.edit_loss(pipe, cache, batch, text, 16) < 1e-6
    reference = cache.grids(16, batch.before, batch.views, batch.variants)
    assert torch.equal(seen["hidden"][:, 16:], pipe._pack_latents(reference, *reference.shape))
    assert seen["shapes"] == [[(1, 4, 4), (1, 4, 4)]] * 6 and 0 <= seen["t"].min() and seen["t"].max() <= 1


def test_it_is_saved_and_drawn_by_diffusers_own_pipeline(pipe, tmp_path):
    pipe.save_pretrained(tmp_path)
    loaded = qwen_edit.load(tmp_path)
    assert type(loaded) is QwenImageEditPipeline
    loaded.set_progress_bar_config(disable=True)
    references = [Image.new("RGB", (64, 64), colour) for colour in ("red", "white")]
    images = qwen_edit.draw(loaded, references, ["make the star blue"] * 2, [1, 2], steps=2)
    assert [image.size for image in images] == [(64, 64)] * 2
    alone = qwen_edit.draw(loaded, references[1:], ["make the star blue"], [2], steps=2)[0]
    assert np.abs(np.asarray(alone, dtype=int) - np.asarray(images[1], dtype=int)).max() <= 1
