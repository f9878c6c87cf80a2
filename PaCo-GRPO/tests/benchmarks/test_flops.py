"""Counted FLOPs against closed forms, and the real models' numbers of parameters."""

import pytest
import torch
from torch import nn

from flops import ImageFlops, Shape, direct_flops, image_flops, main, part_flops
from paco_grpo.rehearsal.architectures import PRESETS
from paco_grpo.rehearsal.models import pipeline_of

TINY = PRESETS["tiny"]
RANK = 8


def linear(rows: int, fan_in: int, fan_out: int) -> int:
    return 2 * rows * fan_in * fan_out


def flux_forward(image: int, text: int) -> dict[str, int]:
    """FLOPs of the tiny FLUX by kind of layer; every product written out by hand."""
    d = 2 * 16
    both, ff = image + text, 4 * d
    conditioning = linear(1, 256, d) + linear(1, d, d)  # each of: time, guidance
    return {
        "embedders": linear(image, 16, d) + linear(text, d, d),
        "time": 2 * conditioning + linear(1, d, d) + linear(1, d, d),  # and the pooled text
        "double": 2 * (
            2 * linear(1, d, 6 * d)  # modulation of image and text
            + 4 * linear(image, d, d) + 4 * linear(text, d, d)  # q, k, v and out
            + 2 * linear(image, d, ff) + 2 * linear(text, d, ff)
            + 4 * both * both * d  # attention: q·k and weights·v
        ),
        "single": (
            linear(1, d, 3 * d) + 3 * linear(both, d, d) + linear(both, d, ff) + linear(both, d + ff, d)
            + 4 * both * both * d
        ) + (  # behind the last block nothing reads the text
            linear(1, d, 3 * d) + linear(image, d, d) + 2 * linear(both, d, d) + linear(image, d, ff)
            + linear(image, d + ff, d) + 4 * image * both * d
        ),
        "out": linear(1, d, 2 * d) + linear(image, d, 16),
    }  # fmt: skip


def test_forward_is_the_closed_form():
    assert direct_flops(TINY, Shape(1, 32, 32, 16), RANK)[0] == sum(flux_forward(16, 16).values())
    assert image_flops(TINY, Shape(1, 64, 32, 24), RANK).forward == sum(flux_forward(32, 24).values())


def test_counting_one_and_two_blocks_is_exact():
    deep = TINY.with_blocks(3, 4)
    assert image_flops(deep, Shape(1, 32, 32, 16), RANK) == ImageFlops(*direct_flops(deep, Shape(1, 32, 32, 16), RANK))


def test_training_is_the_closed_form():
    """LoRA on all attention projections and both feed-forwards of the double blocks, attention alone in the single."""
    image = text = 16
    d, ff, both = 32, 128, 32
    found = ImageFlops(*direct_flops(TINY, Shape(1, 32, 32, text), RANK))

    def lora(rows: int, fan_in: int, fan_out: int) -> int:
        return linear(rows, fan_in, RANK) + linear(rows, RANK, fan_out)

    added = 2 * (2 * 4 * lora(16, d, d) + 2 * (lora(16, d, ff) + lora(16, ff, d)))
    added += 5 * lora(both, d, d) + lora(image, d, d)
    assert found.training_forward == found.forward + added
    # Backward: two products for each of LoRA's, one for each frozen layer that a gradient passes (not the modulation,
    # the embedders, or the very first projections, which no trainable layer precedes), two for each of attention's.
    frozen = flux_forward(image, text)
    attention = 4 * (2 * both + both + image) * both * d  # of all blocks
    passed = frozen["double"] - 2 * 2 * linear(1, d, 6 * d)
    passed += frozen["single"] - 2 * linear(1, d, 3 * d) - attention
    passed += linear(image, d, 16)
    first = 6 * linear(16, d, d)  # q, k, v of image and text in the first block: their input needs no gradient
    first_lora = 6 * linear(16, d, RANK)
    assert found.training_backward == passed - first + 2 * added - first_lora + 2 * attention


@pytest.mark.slow
def test_the_reference_image_of_an_editor_counts_as_tokens():
    kontext = image_flops(PRESETS["kontext-dev"], Shape(1, 256, 256, 64))
    wide = image_flops(PRESETS["flux-dev"], Shape(1, 256, 512, 64))
    assert kontext.forward == wide.forward  # as many tokens
    assert kontext.training_backward == wide.training_backward


@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        ("flux-dev", {"transformer": 11.901, "text_encoder": 0.123, "text_encoder_2": 4.762, "vae": 0.084}),
        ("qwen-edit", {"transformer": 20.430, "text_encoder": 8.292, "vae": 0.127}),
        ("flux2-klein-4b", {"transformer": 3.876, "text_encoder": 4.022, "vae": 0.084}),
        ("flux2-klein-9b", {"transformer": 9.079, "text_encoder": 8.191, "vae": 0.084}),
        ("flux2-dev", {"transformer": 32.223, "vae": 0.084}),
    ],
)
def test_the_real_models_have_their_number_of_parameters(preset, billions):
    pipeline = pipeline_of(PRESETS[preset], torch.bfloat16, "meta")
    for name, expected in billions.items():
        part: nn.Module = getattr(pipeline, name)
        assert sum(p.numel() for p in part.parameters()) / 1e9 == pytest.approx(expected, abs=6e-4), name
        wanted = torch.float32 if name == "vae" else torch.bfloat16
        assert {p.dtype for p in part.parameters()} == {wanted}


def test_the_decoder_and_the_text_encoders_are_counted():
    small, large = (part_flops(TINY, Shape(1, side, side, 16)) for side in (32, 64))
    assert large["decode"] == 4 * small["decode"]  # convolutions alone
    assert large["encode"] == small["encode"] > 0


def test_a_fraction_of_a_model():
    small = PRESETS["flux-dev"].scaled(blocks=0.25, width=0.5)
    assert (small.transformer["num_layers"], small.transformer["num_single_layers"]) == (5, 10)
    assert small.transformer["num_attention_heads"] == 12
    assert small.transformer["joint_attention_dim"] == small.modules["text_encoder_2"].config["d_model"] == 2048
    with pytest.raises(ValueError, match="--blocks"):
        PRESETS["qwen-edit"].scaled(width=0.5)


@pytest.mark.slow
def test_the_table(capsys):
    assert main(["--preset", "flux-small", "--resolutions", "256", "--text", "64"]) == 0
    assert "| 256 | 256 | 64 |" in capsys.readouterr().out
