"""What benchmarks/memory.py computes on the meta device equals what real tensors take on the CPU."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from named import load

import memory
from measuring import footprint as fp
from measuring.live_bytes import LiveBytes, MetaAutocast, SavedBytes
from paco_grpo.objectives.base import Step
from paco_grpo.policies.performance import quantize

ROOT = Path(__file__).resolve().parents[2]

BLOCK = 64  # bytes; the CPU's allocator


@pytest.fixture(scope="module")
def resident_parts():
    """Bytes by part of t2is."""
    options = load("t2is")
    return fp.resident(fp.meta_policy(options), options)


def tiny(folder, checkpointing=False, **changes):
    pairs = {
        "pretrained.model": str(folder), "max_sequence_length": "24", "train.lora_rank": "4", "train.resolution": "64",
        "train.batch_size": "3", "test.resolution": "64", "enable_gradient_checkpointing": str(checkpointing),
        "sample.merge_lora": "0", "mixed_precision": "no",
    }  # fmt: skip
    return load("t2is", *(pairs | changes).items())


def real_policy(options):
    """The same policy with real tensors on the CPU."""
    speed = dataclasses.replace(options.speed, offload_text_encoders=False)
    return fp.random_policy(dataclasses.replace(options, speed=speed), torch.device("cpu"))


def allocated_at_most(action) -> int:
    """Bytes beyond the start, as the allocator itself reports each of its allocations: nothing of ours counts here."""
    with torch.profiler.profile(profile_memory=True) as profile:
        action()
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]" and event.device_type().name == "CPU":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["flux", "flux_kontext", "qwen_image_edit"])
def test_training_on_meta_takes_the_bytes_of_real_tensors(name, checkpointing, tiny_folder):
    options = tiny(tiny_folder(name), checkpointing)
    meta, real = fp.meta_policy(options), real_policy(options)
    size = fp.Shape(3, 64, 64, 24)
    computed, taken = (fp.training(policy, options, size, BLOCK) for policy in (meta, real))
    assert (computed["saved"], computed["gradients"]) == (taken["saved"], taken["gradients"])
    assert abs(computed["peak"] - taken["peak"]) <= 4 * BLOCK  # a scalar more or less
    assert computed["gradients"] > 0 and computed["peak"] > computed["saved"]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_peak_is_what_the_allocator_says(checkpointing, tiny_folder):
    options = tiny(tiny_folder("flux"), checkpointing)
    size = fp.Shape(3, 64, 64, 24)
    computed = fp.training(fp.meta_policy(options), options, size, BLOCK)
    policy = real_policy(options)
    fp.training(policy, options, size)  # kernels that set something aside at their first call
    measured = allocated_at_most(lambda: fp.training(policy, options, size))
    # the rest is what kernels set aside for themselves, much beside so small a model
    assert computed["peak"] <= measured <= 1.12 * computed["peak"]


def test_checkpointing_keeps_less():
    found = {}
    for checkpointing in (False, True):
        options = tiny(ROOT.parent / "quickstart" / "models" / "flux", checkpointing)
        policy = fp.meta_policy(options)
        found[checkpointing] = fp.training(policy, options, fp.shape(policy, options, 64, 2))
    assert found[True]["saved"] < found[False]["saved"] / 3
    assert found[True]["peak"] < found[False]["peak"]


def test_a_tail_in_int8_takes_a_byte_a_weight_more(tiny_folder):
    options = tiny(tiny_folder("flux"))
    policy = real_policy(options)
    assert fp.tail_bytes(policy, options) == 0
    options = tiny(tiny_folder("flux"), **{"sample.tail_weights": "int8"})
    with quantize.int8_copies(policy):
        made = [layer for layer in policy.transformer.modules() if quantize.is_quantized(layer)]
        stored = sum(layer.weight.CB.nbytes + layer.weight.SCB.nbytes for layer in made)
    assert fp.tail_bytes(policy, options) == stored > 0


def test_autocast_is_imitated(tiny_folder):
    """On real CPU tensors, the imitation keeps and takes what CPU's autocast does (without CUDA's float32 list)."""
    options = tiny(tiny_folder("flux"), mixed_precision="bf16")
    found = []
    for imitated in (False, True):
        policy = real_policy(options)
        if imitated:
            policy.autocast = lambda: MetaAutocast(torch.bfloat16, float32=frozenset())
        size = fp.Shape(2, 64, 64, 24)
        step = Step(fp.rollout(policy, options, size), 1, torch.zeros(2))
        with SavedBytes(policy.transformer) as saved, torch.random.fork_rng():
            fp.get_objective("ppo")(step, policy, options.train)
        found.append(saved.total)
    assert found[0] == found[1] > 0


def test_live_bytes_counts_each_storage_once_and_forgets_the_dead():
    with LiveBytes(1) as live:
        a = torch.zeros(100)
        view = a[10:].view(9, 10).t()
        a.add_(1)
        assert live.now == 400
        b = view + 1
        assert live.now == 760
        del a
        assert live.now == 760, "the view keeps it"
        del view, b
        assert live.now == 0 and live.peak == 760


def test_real_sizes():
    """FLUX.1-dev's published sizes; a LoRA layer of rank 64 has 64·(in + out) weights."""
    options = load("t2is")
    policy = fp.meta_policy(options)
    counts = fp.parameters(policy)
    assert counts["transformer"] == 11_901_408_320
    assert counts["text_encoder_2"] == 4_762_310_656 and counts["text_encoder"] == 123_060_480
    width, double, single = 3072, 19, 38
    attention = 8 * 2 * width * double + 3 * 2 * width * single
    feed_forward = 2 * 2 * 5 * width * double
    assert counts["adapter"] == 64 * (attention + feed_forward)
    parts = fp.resident(policy, options)
    assert parts["transformer"] == 2 * counts["transformer"]
    assert parts["optimizer"] == 2 * parts["adapter"] == 8 * counts["adapter"]
    assert parts["rewards"] == 2 * 4 * 986_109_441 and "text encoders" not in parts


@pytest.mark.parametrize(
    ("change", "part", "factor"),
    [
        (("train.use_8bit_adam", "1"), "optimizer", 0.25),
        (("train.ema", "0"), "average", 0.0),
        (("pretrained.quantize", "int8"), "transformer", 0.5),
        (("pretrained.quantize", "nf4"), "transformer", 0.26),
        (("speed.offload_vae", "1"), "VAE", 0.0),
        (("train.reward_fn_kwargs.pickscore.device", "cpu"), "rewards", 0.5),
    ],
)
def test_an_option_changes_its_part_and_no_other(change, part, factor, resident_parts):
    before, options = resident_parts, load("t2is", change)
    after = fp.resident(fp.meta_policy(options), options)
    assert after.get(part, 0) / before[part] == pytest.approx(factor, abs=0.02)
    assert {k: v for k, v in before.items() if k != part} == {k: v for k, v in after.items() if k != part}


def test_command_writes_a_table_and_json(tiny_folder, tmp_path, capsys):
    command = [
        "--config",
        f"{ROOT / 'config' / 'grpo.py'}:toy_t2is",
        f"--config.pretrained.model={tiny_folder('flux')}",
    ]
    assert memory.main([*command, "--processes", "2", "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "toy_t2is.json").read_text())
    assert found["kind"] == "computed" and found["peak"] == max(row["total"] for row in found["phases"].values())
    assert found["resident"] == sum(found["parts"].values())
    said = capsys.readouterr().out
    assert "computed" in said and "24 GB: fits" in said
    assert memory.main(["--config", command[1], "--config.pretrained.model=someone/unknown"]) == 2
    assert "the architecture of 'someone/unknown' is not known" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert memory.main([*command, "--measure", "--output", str(tmp_path)]) == 2
        assert "--measure needs a CUDA device" in capsys.readouterr().err
