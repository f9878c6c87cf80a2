"""The toy Qwen-Image-Edit: a VAE trained as for stills, and a text encoder that reads like the pipeline."""

import numpy as np
import pytest
import torch
from PIL import Image

from toy_models import qwen_edit
from toy_models.edit_data import INSTRUCTIONS, render_edits, sample_edits
from toy_models.panels import PanelCache, to_tensor
from toy_models.scene_reader import NO_INSTRUCTION, SceneReader, new_editor_processor, new_text_encoder, prompt_template
from toy_models.training import pack
from toy_models.vae import new_qwen_vae, qwen_latents, stills_only, train_qwen_vae


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


def test_training_sets_the_latents_statistics(panels):
    vae = new_qwen_vae(0)
    train_qwen_vae(vae, panels, 1.5, 0)
    assert vae.encoder.conv_in.weight.requires_grad
    z = qwen_latents(vae)(to_tensor(panels[32].draw_grids(*np.indices((4, 4)), np.random.default_rng(0))))
    assert z.shape == (4, 4, 16, 16) and 0.5 < z.std() < 2 and np.all(np.array(vae.config.latents_std) > 0)


def test_every_word_is_one_token_and_the_scene_follows_the_dropped_tokens():
    tokenizer = new_editor_processor().tokenizer
    template, dropped = prompt_template()
    for instruction in INSTRUCTIONS:
        tokens = tokenizer.tokenize(template.format(instruction))
        assert tokens[dropped] == "<|vision_start|>" and tokens[dropped - 2 : dropped] == ["user", "Ċ"]
        assert [token.lstrip("Ġ") for token in tokens[dropped + 3 : -5]] == instruction.split()
    assert tokenizer.tokenize(NO_INSTRUCTION) == ["Ġ"]
    assert tokenizer.decode(tokenizer("any äöü 漢字").input_ids) == "any äöü 漢字"  # nothing is unknown


def test_the_reader_computes_the_pipelines_features(pipe, panels):
    reader, rng = SceneReader(pipe.text_encoder.eval(), pipe.processor), np.random.default_rng(0)
    batch = sample_edits(3, rng)
    pixels = render_edits(batch, panels[32])[0]
    for texts in (batch.instructions, [NO_INSTRUCTION] * 3):
        with torch.no_grad():
            ours = reader(pixels, texts)
            theirs = [
                pipe.encode_prompt([t], image=[Image.fromarray(p)])[0] for t, p in zip(texts, pixels, strict=True)
            ]
        torch.testing.assert_close(ours, torch.cat(theirs), rtol=1e-4, atol=1e-5)


def test_a_transformer_that_knows_the_answer_has_no_loss(pipe, panels, monkeypatch):
    """Order of tokens, times and sign are the pipeline's."""
    seen = {}

    def knowing(*, hidden_states, timestep, encoder_hidden_states, img_shapes, return_dict):
        seen.update(hidden=hidden_states, t=timestep, shapes=img_shapes, text=encoder_hidden_states)
        half = hidden_states.shape[1] // 2
        noisy, t = hidden_states[:, :half], timestep[:, None, None]
        return (torch.cat([(noisy - tokens) / t, torch.zeros_like(noisy)], dim=1),)

    class Latents:
        @staticmethod
        def grids(side, characters, views, variants):
            return torch.from_numpy(np.random.default_rng(characters.ravel()).normal(size=(6, 4, 8, 8))).float()

    batch = sample_edits(6, np.random.default_rng(1), departure=0.0)
    x0, reference = (Latents.grids(16, kind, batch.views, batch.variants) for kind in (batch.after, batch.before))
    tokens = pack(x0)
    monkeypatch.setattr(pipe, "transformer", knowing)
    text = torch.zeros(6, 15, 96)
    assert qwen_edit.edit_loss(pipe, Latents, batch, text, 16) < 1e-6
    assert torch.equal(seen["hidden"][:, 16:], pack(reference))
    assert seen["shapes"] == [[(1, 4, 4), (1, 4, 4)]] * 6 and 0 <= seen["t"].min() and seen["t"].max() <= 1
