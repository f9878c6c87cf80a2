"""scripts/estimate.py: closed forms of FLOPs and memory on tiny models, planted defects that only
CUDA shows, the command.
"""

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
    """What ``function(module, x)`` counts on the fake CPU."""
    device = FakeDevice("cpu")
    fake_device.place(module, device, "cpu")
    with device.mode:
        x = torch.empty(shape)
    with fake_cpu(device):
        return measured(device, lambda: function(module, x))


def test_flops_and_peak_of_a_linear_layer_and_of_attention():
    """A product of (m, k) and (k, n) is 2·m·k·n. Forward and backward have one each, because the
    input's gradient is not needed.
    """
    with torch.device("meta"):
        layer = nn.Linear(512, 256, bias=False)
    counted = run_on_cpu(layer, lambda m, x: m(x).sum().backward(), (64, 512))
    assert counted.flops == 2 * 2 * 64 * 512 * 256
    # The gradient of the weights; two scalars take 512 bytes each.
    assert counted.peak == 4 * 512 * 256 + 2 * 512

    attention = nn.functional.scaled_dot_product_attention
    counted = run_on_cpu(layer, lambda _, x: attention(x, x, x), (2, 3, 128, 64))
    assert counted.flops == 2 * 2 * 2 * 3 * 128 * 128 * 64  # both products of all heads


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


PUBLISHED_BILLIONS = {
    "black-forest-labs/FLUX.1-dev": 11.90,
    "Qwen/Qwen-Image": 20.43,
    "black-forest-labs/FLUX.2-dev": 32.2,
    "stabilityai/stable-diffusion-3.5-large": 8.06,
    "Tongyi-MAI/Z-Image": 6.15,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8.292,
    "Qwen/Qwen3-VL-4B-Instruct": 4.438,
    "Qwen/Qwen3-VL-8B-Instruct": 8.767,
}


@pytest.mark.parametrize("model", PUBLISHED_BILLIONS)
def test_models_have_the_published_number_of_parameters(model):
    if "VL" in model:
        module = judge_of(model, torch.bfloat16)
    else:
        module = pipeline_of(model, torch.bfloat16).transformer
    billions = sum(parameter.numel() for parameter in module.parameters()) / 1e9
    assert billions == pytest.approx(PUBLISHED_BILLIONS[model], rel=0.005)


def test_random_weights_become_a_policy(tmp_path, monkeypatch):
    """benchmarks/epoch.py --random_weights, here without memory."""
    monkeypatch.setattr(architectures, "PartialState", lambda: SimpleNamespace(device="meta"))
    folder = architectures.write("Tongyi-MAI/Z-Image", tmp_path)
    with architectures.random_weights("Tongyi-MAI/Z-Image"):
        assert type(load_policy(folder, PolicySettings(device="meta"))).__name__ == "ZImagePolicy"


def tiny(folder, name="t2is", **changes):
    options = {
        "pretrained.model": str(folder),
        "max_sequence_length": "24",
        "train.lora_rank": "4",
        "train.resolution": "64",
        "test.resolution": "64",
    }
    options |= {key.replace("__", "."): value for key, value in changes.items()}
    return load(name, *options.items())


@pytest.fixture(scope="module")
def tiny_flux(tiny_flux_dir):
    """What is estimated for it on eight GPUs."""
    return generator.estimate(tiny(tiny_flux_dir), "tiny", processes=8)


def test_an_epoch_of_a_tiny_flux(tiny_flux):
    work = {part.name: part for part in tiny_flux.work["an epoch"]}
    assert list(work) == ["encode", "denoise", "decode", "train", "probe"]
    assert work["denoise"].pieces == 84 * 10
    assert work["decode"].pieces == work["train"].pieces == 84
    # Weights are frozen: the backward pass computes the gradients of inputs and of the adapter.
    assert 1.9 < work["train"].flops / work["denoise"].flops < 2.6
    adapter = tiny_flux.resident["adapter"]
    assert tiny_flux.resident["optimizer"] == 2 * adapter
    assert tiny_flux.adds["train"]["gradients"] == adapter
    assert tiny_flux.adds["update"]["gradients in one message"] == adapter
    assert tiny_flux.resident["OpenCLIP ViT-H-14"] == 4 * 986_109_441


def test_an_editor_with_a_copy_of_the_adapter(tiny_folder):
    """nft keeps an old adapter, and the text encoder of Qwen-Image-Edit computes positions of image
    tokens on the device.
    """
    options = tiny(tiny_folder("qwen_image_edit"), "qwen_editing_nft")
    resident = generator.estimate(options, "qwen").resident
    assert resident["old adapter"] == resident["adapter"]


def test_options_change_the_memory_that_they_should(tiny_flux_dir, tiny_flux):
    options = tiny(
        tiny_flux_dir,
        enable_gradient_checkpointing="true",
        pretrained__quantize="nf4",
        train__ema="false",
        speed__offload_vae="true",
        train__use_8bit_adam="true",
    )
    changed = generator.estimate(options, "tiny", processes=8)
    assert changed.adds["train"]["activations"] < 0.7 * tiny_flux.adds["train"]["activations"]
    layers = quantizable(pipeline_of(str(tiny_flux_dir), torch.bfloat16).transformer)
    saved = sum(layer.weight.numel() for _, layer in layers) * (2 - 1 / 2 - 1 / 64 - 1 / 4096)
    expected = tiny_flux.resident["transformer"] - saved
    assert changed.resident["transformer"] == pytest.approx(expected, rel=1e-3)
    assert "average" not in changed.resident and "VAE" not in changed.resident
    assert changed.resident["optimizer"] == tiny_flux.resident["optimizer"] // 4


def test_a_text_encoder_left_on_the_cpu_is_found(tiny_flux_dir, monkeypatch):
    place = fake_device.place

    def forgetful(module, device, on):
        place(module, device, "cpu" if type(module).__name__ == "CLIPTextModel" else on)

    def without_copy(self, items):  # diffusers sends the ids to where the weights are
        from paco_grpo.policies.diffusers_policy import TextConditioning

        texts = [self._encode_text(item.prompt) for item in items]
        embeds = torch.stack([embeds for embeds, _ in texts])
        pooled = torch.stack([pooled for _, pooled in texts])
        return TextConditioning(prompt_embeds=embeds, prompt_pooled=pooled)

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


def test_the_judges_share_by_hand(tiny_flux):
    """96 images of 6 pairs. A GPU samples one in 2 s and trains on one in 1 s; a judge answers 12
    pairs a second.
    """
    sizes = {"samples": 96, "samples_per_process": 12, "sample_batch_size": 4}
    plan = dataclasses.replace(tiny_flux.plan, **sizes)
    work = [Work("denoise", 12, 2.0), Work("train", 12, 1.0)]
    estimated = dataclasses.replace(tiny_flux, plan=plan, work={"an epoch": work})
    card = Card("one FLOP a second", memory=0, flops=1.0)
    judge = Judge(pairs_per_image=6, gpus=1, pairs_per_second=12.0, most_pairs_per_second=48.0)
    split = planning.split(estimated, card, judge, 4, 4)
    assert list(split) == ["sample", "judge", "wait", "train", "epoch"]
    # 6 batches of 8 s; 576 pairs / 48 = 12 s of judging, and its last batch of 2 s is waited for.
    assert list(split.values()) == [48, 12, 2, 24, 74]
    # 3 batches; 48 s of judging begin after 8 s and end at 56 s, and sampling ends at 24 s.
    assert list(planning.split(estimated, card, judge, 8, 1).values()) == [24, 48, 32, 12, 68]
    # Its API servers read 24 pairs a second, which four GPUs do not change.
    slow = dataclasses.replace(judge, most_pairs_per_second=24.0)
    assert planning.split(estimated, card, slow, 4, 4)["judge"] == 24
    # The host needs 3 s to sample an image, the GPU 2 s; 0.5 s to train on it, the GPU 1 s.
    work = [Work("denoise", 12, 2.0, operators=6), Work("train", 12, 1.0, operators=1)]
    estimated = dataclasses.replace(estimated, work={"an epoch": work})
    slow_host = dataclasses.replace(card, operator_s=0.5)
    split = planning.split(estimated, slow_host, judge, 4, 4)
    assert (split["sample"], split["train"]) == (72, 24)
    compiled = dataclasses.replace(estimated, compiled=True)
    assert compiled.seconds("an epoch", slow_host) == 36


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


CONFIG = ["--config", f"{ROOT}/config/grpo.py:t2is"]


@pytest.fixture
def command(tiny_flux_dir, tiny_flux, monkeypatch):
    """``estimate.py`` for the tiny FLUX: its status."""
    monkeypatch.setattr(generator, "estimate", lambda *_: tiny_flux)
    model = f"--config.pretrained.model={tiny_flux_dir}"
    return lambda *arguments: estimate.main([*CONFIG, model, *arguments])


def test_the_command_reports_and_sets_its_status(command, capsys):
    assert command("--gpus", "8") == 0
    printed = capsys.readouterr().out
    assert "fits: " in printed and printed.count("<- best") == 1
    assert "a run: 1000 epochs (config.num_epochs) of" in printed
    assert "and 101 evaluations of" in printed
    assert command("--memory_gb", "8") == 1  # the CLIP rewards alone take 7.3 GiB
    assert "does not fit" in capsys.readouterr().out


def test_the_command_refuses_wrong_options(command):
    for arguments in (["--config.sample.batch_sise=2"], ["--gpus", "1"], ["--gpu", "H100"]):
        assert command(*arguments) == 2
    for option in ("memory_gb", "processes", "gpus", "judge_pairs_per_second", "operator_us"):
        for value in ("nan", "-1", "0", "inf", "many"):
            with pytest.raises(SystemExit):
                command(f"--{option}={value}")


def test_the_command_names_an_unknown_model(capsys):
    assert estimate.main([*CONFIG, "--config.pretrained.model=nobody/nothing"]) == 2
    assert "nobody/nothing" in capsys.readouterr().err


def test_a_reward_of_the_test_alone_is_where_its_arguments_say():
    on_cpu = {"pickscore": {"device": "cpu"}}
    test = TestOptions(reward_fn={"pickscore": 1.0}, reward_fn_kwargs=on_cpu)
    assert memory.reward_bytes(RunOptions(test=test)) == {}
    test = TestOptions(reward_fn={"pickscore": 1.0})
    assert len(memory.reward_bytes(RunOptions(test=test))) == 1


def save_judge_config(folder):
    text = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [2, 3, 3],
        },
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [0],
    }
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.save_pretrained(folder)


def test_the_command_for_judge_training(tmp_path, capsys, monkeypatch):
    save_judge_config(tmp_path)
    common = ["--judge", str(PUBLISHED_JUDGE), "image_max_pixels=50176"]
    common.append(f"model_name_or_path={tmp_path}")
    assert estimate.main(common) == 0
    assert "pairs of 378 tokens" in capsys.readouterr().out
    # One gigabyte is less than CUDA itself takes.
    assert estimate.main([*common, "first_token_weight=null", "--memory_gb", "1"]) == 1
    for arguments, named in (
        ([*common, "model_name_or_path=nobody/nothing"], "nobody/nothing"),
        (["--judge", "lora_rnk=8"], "lora_rnk"),
    ):
        assert estimate.main(arguments) == 2
        assert named in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "paco_reward.config", None)
    assert estimate.main(["--judge"]) == 2
    assert "paco_reward" in capsys.readouterr().err
