"""scripts/estimate.py: closed forms of FLOPs and memory on tiny models, planted defects that only CUDA shows, the command."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from named import load
from tiny_run import ROOT, load_script
from torch import nn

from paco_grpo import architectures
from paco_grpo.architectures import judge_of, pipeline_of
from paco_grpo.estimate import fake_device, generator, memory, planning
from paco_grpo.estimate.fake_device import FakeDevice, fake_cpu, fake_cuda, measured
from paco_grpo.estimate.judge_training import PUBLISHED_JUDGE
from paco_grpo.estimate.planning import Card, Judge, Work
from paco_grpo.options.schema import RunOptions, TestOptions
from paco_grpo.policies import PolicySettings, load_policy
from paco_grpo.policies.flux import FluxPolicy
from paco_grpo.policies.memory import quantizable

estimate = load_script("estimate")


def run_on_cpu(module, function, shape):
    """What ``function(module, x)`` counts on the fake CPU; a copy of ``module`` gets the fake weights."""
    device = FakeDevice("cpu")
    fake_device.place(module, device, "cpu")
    with device.mode:
        x = torch.empty(shape)
    with fake_cpu(device):
        return measured(device, lambda: function(module, x))


def test_flops_and_peak_of_a_linear_layer_and_of_attention():
    """A product of (m, k) and (k, n) is 2·m·k·n; the backward pass has two of them, the input's gradient is not needed."""
    with torch.device("meta"):
        layer = nn.Linear(512, 256, bias=False)
    found = run_on_cpu(layer, lambda m, x: m(x).sum().backward(), (64, 512))
    assert found.flops == 2 * 2 * 64 * 512 * 256
    assert (
        found.peak == 4 * 512 * 256 + 2 * 512
    )  # the gradient of the weights; scalars take 512 bytes each
    found = run_on_cpu(
        layer, lambda _, x: nn.functional.scaled_dot_product_attention(x, x, x), (2, 3, 128, 64)
    )
    assert found.flops == 2 * 2 * 2 * 3 * 128 * 128 * 64  # both products of all heads


def test_cudas_autocast_is_active_and_values_come_back_as_zeros():
    device = FakeDevice("cuda")
    with torch.device("meta"):
        layer = nn.Linear(8, 8)
    fake_device.place(layer, device, "cuda:0")
    with fake_cuda(device):
        x = torch.ones(2, 8).to("cuda")
        with torch.autocast("cuda", torch.bfloat16):
            y = layer(x)
            assert y.dtype == torch.bfloat16 and torch.rms_norm(y, (8,)).dtype == torch.float32
        assert y.cpu().tolist() == [[0.0] * 8] * 2
        mask = torch.tensor([1, 0, 1, 1]).to("cuda").bool()  # known integers stay known
        assert int(mask.sum()) == 3 and torch.empty(4, 8, device="cuda")[mask].shape == (3, 8)
        with pytest.raises(RuntimeError, match="device"):
            layer(torch.ones(2, 8, device="cuda")) + torch.ones(2, 8)


def test_models_have_the_published_number_of_parameters():
    for model, billions in {
        "black-forest-labs/FLUX.1-dev": 11.90, "Qwen/Qwen-Image": 20.43, "black-forest-labs/FLUX.2-dev": 32.2,
        "stabilityai/stable-diffusion-3.5-large": 8.06, "Tongyi-MAI/Z-Image": 6.15,
        "Qwen/Qwen2.5-VL-7B-Instruct": 8.292, "Qwen/Qwen3-VL-4B-Instruct": 4.438, "Qwen/Qwen3-VL-8B-Instruct": 8.767,
    }.items():  # fmt: skip
        found = (
            judge_of(model, torch.bfloat16)
            if "VL" in model
            else pipeline_of(model, torch.bfloat16).transformer
        )
        assert sum(p.numel() for p in found.parameters()) / 1e9 == pytest.approx(
            billions, rel=0.005
        )


def test_random_weights_become_a_policy(tmp_path, monkeypatch):
    """benchmarks/epoch.py --random_weights, here without memory."""
    monkeypatch.setattr(architectures, "PartialState", lambda: SimpleNamespace(device="meta"))
    folder = architectures.write("Tongyi-MAI/Z-Image", tmp_path)
    with architectures.random_weights("Tongyi-MAI/Z-Image"):
        assert type(load_policy(folder, PolicySettings(device="meta"))).__name__ == "ZImagePolicy"


def tiny(folder, name="t2is", **more):
    pairs = {
        "pretrained.model": str(folder), "max_sequence_length": "24", "train.lora_rank": "4", "train.resolution": "64",
        "test.resolution": "64",
    }  # fmt: skip
    return load(
        name, *(pairs | {key.replace("__", "."): value for key, value in more.items()}).items()
    )


@pytest.fixture(scope="module")
def found(tiny_flux_dir):
    return generator.estimate(tiny(tiny_flux_dir), "tiny", processes=8)


def test_an_epoch_of_a_tiny_flux(found):
    work = {w.name: w for w in found.work["an epoch"]}
    assert list(work) == ["encode", "denoise", "decode", "train", "probe"]
    assert work["denoise"].pieces == 84 * 10 and work["decode"].pieces == work["train"].pieces == 84
    # weights are frozen: the backward pass computes the inputs' gradients alone, and those of the adapter
    assert 1.9 < work["train"].flops / work["denoise"].flops < 2.6
    assert (
        found.resident["optimizer"]
        == 2 * found.resident["adapter"]
        == 2 * found.adds["train"]["gradients"]
    )
    assert found.adds["update"]["gradients in one message"] == found.resident["adapter"]
    assert found.resident["OpenCLIP ViT-H-14"] == 4 * 986_109_441


def test_an_editor_with_a_copy_of_the_adapter(tiny_folder):
    """nft keeps an old adapter, and the text encoder of Qwen-Image-Edit computes positions of image tokens on the device."""
    resident = generator.estimate(
        tiny(tiny_folder("qwen_image_edit"), "qwen_editing_nft"), "qwen"
    ).resident
    assert resident["old adapter"] == resident["adapter"]


def test_options_change_the_memory_that_they_should(tiny_flux_dir, found):
    options = tiny(tiny_flux_dir, enable_gradient_checkpointing="true", pretrained__quantize="nf4", train__ema="false",
                   speed__offload_vae="true", train__use_8bit_adam="true")  # fmt: skip
    changed = generator.estimate(options, "tiny", processes=8)
    assert changed.adds["train"]["activations"] < 0.7 * found.adds["train"]["activations"]
    layers = quantizable(pipeline_of(str(tiny_flux_dir), torch.bfloat16).transformer)
    saved = sum(layer.weight.numel() for _, layer in layers) * (2 - 1 / 2 - 1 / 64 - 1 / 4096)
    assert changed.resident["transformer"] == pytest.approx(
        found.resident["transformer"] - saved, rel=1e-3
    )
    assert "average" not in changed.resident and "VAE" not in changed.resident
    assert changed.resident["optimizer"] == found.resident["optimizer"] // 4


def test_a_text_encoder_left_on_the_cpu_is_found(tiny_flux_dir, monkeypatch):
    place = fake_device.place

    def forgetful(module, device, on):
        place(module, device, "cpu" if type(module).__name__ == "CLIPTextModel" else on)

    def without_copy(self, items):  # diffusers sends the ids to where the weights are
        from paco_grpo.policies.diffusers_policy import TextConditioning

        embeds, pooled = zip(*(self._encode_text(item.prompt) for item in items), strict=True)
        return TextConditioning(
            prompt_embeds=torch.stack(embeds), prompt_pooled=torch.stack(pooled)
        )

    monkeypatch.setattr(fake_device, "place", forgetful)
    monkeypatch.setattr(FluxPolicy, "encode", without_copy)
    with pytest.raises(RuntimeError, match="device"):
        generator.estimate(tiny(tiny_flux_dir), "planted")


def test_a_text_of_the_wrong_width_is_found(tiny_flux_dir, monkeypatch):
    encode = FluxPolicy._encode_text

    def narrow(self, text):
        embeds, pooled = encode(self, text)
        return embeds[:, :-1], pooled

    monkeypatch.setattr(FluxPolicy, "_encode_text", narrow)
    with pytest.raises(RuntimeError, match="reduction dim|shape"):
        generator.estimate(tiny(tiny_flux_dir), "planted")


def test_the_judges_share_by_hand(found):
    """96 images of 6 pairs; a GPU samples one in 2 s and trains on one in 1 s; a judge answers 12 pairs a second."""
    plan = dataclasses.replace(found.plan, samples=96, samples_per_process=12, sample_batch_size=4)
    work = [Work("denoise", 12, 2.0), Work("train", 12, 1.0)]
    made = dataclasses.replace(found, plan=plan, work={"an epoch": work})
    card = Card("one FLOP a second", memory=0, flops=1.0)
    judge = Judge(pairs_per_image=6, gpus=1, pairs_per_second=12.0, most_pairs_per_second=48.0)
    # 6 batches of 8 s; 576 pairs / 48 = 12 s of judging, 2 s of it for the last batch, which is waited for
    assert planning.split(made, card, judge, 4, 4) == {
        "sample": 48,
        "judge": 12,
        "wait": 2,
        "train": 24,
        "epoch": 74,
    }
    # 3 batches; 48 s begin after 8 s: done at 56, sampled at 24
    assert planning.split(made, card, judge, 8, 1) == {
        "sample": 24,
        "judge": 48,
        "wait": 32,
        "train": 12,
        "epoch": 68,
    }
    # Its API servers read 24 pairs a second, which four GPUs do not change.
    slow = dataclasses.replace(judge, most_pairs_per_second=24.0)
    assert planning.split(made, card, slow, 4, 4)["judge"] == 24
    # The host needs 3 s for each image that is sampled, the GPU 2 s; and 0.5 s to train on it, the GPU 1 s.
    work = [Work("denoise", 12, 2.0, operators=6), Work("train", 12, 1.0, operators=1)]
    made = dataclasses.replace(made, work={"an epoch": work})
    seconds = planning.split(made, dataclasses.replace(card, operator_s=0.5), judge, 4, 4)
    assert (seconds["sample"], seconds["train"]) == (72, 24)
    compiled = dataclasses.replace(made, compiled=True)
    assert compiled.seconds("an epoch", dataclasses.replace(card, operator_s=0.5)) == 36


def test_a_measured_rate_of_the_judge_counts_more_than_assumptions():
    card = planning.card_of("H100 80GB", None, 9e-6)
    options = load("t2is")
    assumed = planning.judge_of_run(options, card, None, 80.0)
    assert 60 < assumed.pairs_per_second < 80 and assumed.most_pairs_per_second == 80
    known = planning.judge_of_run(options, card, 120.0, 80.0)
    assert known.seconds(120, 1) == pytest.approx(assumed.pairs_per_image)
    assert planning.judge_of_run(load("ocr"), card, None, 80.0) is None


def test_operators_are_counted_without_views():
    with torch.device("meta"):
        layer = nn.Linear(8, 8)
    # The product with the bias and the sum; the transposed weight and the view of x are none.
    counted = run_on_cpu(layer, lambda m, x: m(x.view(2, 8)).sum(), (16,))
    assert counted.operators == 2


def test_the_command_reports_and_sets_its_status(tiny_flux_dir, found, monkeypatch, capsys):
    monkeypatch.setattr(generator, "estimate", lambda *_: found)
    common = [
        "--config",
        f"{ROOT}/config/grpo.py:t2is",
        f"--config.pretrained.model={tiny_flux_dir}",
    ]
    assert estimate.main([*common, "--gpus", "8"]) == 0
    printed = capsys.readouterr().out
    assert "fits: " in printed and printed.count("<- best") == 1
    assert "a run: 1000 epochs (config.num_epochs) of" in printed
    assert "and 101 evaluations of" in printed
    assert estimate.main([*common, "--memory_gb", "8"]) == 1  # the CLIP rewards alone take 7.3 GiB
    assert "does not fit" in capsys.readouterr().out
    for wrong in (["--config.sample.batch_sise=2"], ["--gpus", "1"], ["--gpu", "H100"]):
        assert estimate.main([*common, *wrong]) == 2
    for option in ("memory_gb", "processes", "gpus", "judge_pairs_per_second", "operator_us"):
        for value in ("nan", "-1", "0", "inf", "many"):
            with pytest.raises(SystemExit):
                estimate.main([*common, f"--{option}={value}"])
    monkeypatch.undo()
    assert (
        estimate.main(
            ["--config", f"{ROOT}/config/grpo.py:t2is", "--config.pretrained.model=nobody/nothing"]
        )
        == 2
    )
    assert "nobody/nothing" in capsys.readouterr().err


def test_a_reward_of_the_test_alone_is_where_its_arguments_say():
    test = TestOptions(
        reward_fn={"pickscore": 1.0}, reward_fn_kwargs={"pickscore": {"device": "cpu"}}
    )
    assert memory.reward_bytes(RunOptions(test=test)) == {}
    assert (
        len(memory.reward_bytes(RunOptions(test=dataclasses.replace(test, reward_fn_kwargs={}))))
        == 1
    )


def test_the_command_for_judge_training(tmp_path, capsys, monkeypatch):
    text = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [0],
    }
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text | {"rope_parameters": rope}, vision_config=vision
    )
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    common = [
        "--judge",
        str(PUBLISHED_JUDGE),
        "image_max_pixels=50176",
        f"model_name_or_path={tmp_path}",
    ]
    assert estimate.main(common) == 0
    assert "pairs of 378 tokens" in capsys.readouterr().out
    assert (
        estimate.main([*common, "first_token_weight=null", "--memory_gb", "1"]) == 1
    )  # less than CUDA itself takes
    assert estimate.main([*common, "model_name_or_path=nobody/nothing"]) == 2
    assert "nobody/nothing" in capsys.readouterr().err
    assert estimate.main(["--judge", "lora_rnk=8"]) == 2
    assert "lora_rnk" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "paco_reward.config", None)
    assert estimate.main(["--judge"]) == 2
    assert "paco_reward" in capsys.readouterr().err
