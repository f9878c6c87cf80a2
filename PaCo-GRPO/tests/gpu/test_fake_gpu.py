"""The product on a fake CUDA runtime, at the real size: data types, devices and memory.

Without numbers: speed, kernels and rounding are for a GPU to show.
"""

from typing import Any

import pytest
from fake_gpu import run
from named import load

from paco_grpo.estimate.generator import RESERVE
from paco_grpo.estimate.report import GIB, GPUS

# By suffix; without one, as with _80gb.
CARDS = {"_24gb": "RTX 4090 24GB", "_48gb": "L40S 48GB", "_80gb": "H100 80GB"}
# With and without true CFG, reference images, 4 bits, and weights in main memory.
MORE = [
    "kontext_editing_24gb",
    "klein_editing",
    "qwen_editing_48gb",
    "sd3_t2is_24gb",
    "krea_t2is_48gb",
    "longcat_editing_24gb",
    "qwen21_t2is_48gb",
]
ON_GPU = "torch.float32 cuda:0"
FUSED = ["scaled_dot_product_efficient_attention", "scaled_dot_product_flash_attention"]
CUDNN = ["scaled_dot_product_cudnn_attention"]


def step(name: str, blocks: int | None) -> list[Any]:
    suffix = next((suffix for suffix in CARDS if suffix in name), "_80gb")
    return ["real_step", name, blocks, GPUS[CARDS[suffix]][0]]


def check_step(seen: dict[str, Any]) -> None:
    name = seen["name"]
    options = load(name)
    trained = seen["trained"]
    # Nothing reads what the last block of Qwen-Image writes to the text: three layers, A and B.
    unread = 6 if "qwen" in name and "qwen21" not in name else 0
    assert seen["gradients"].pop("missing", 0) == unread, name
    assert seen["gradients"] == {ON_GPU: trained - unread}, name
    moments = {f"{moment} {ON_GPU}": trained for moment in ("step", "exp_avg", "exp_avg_sq")}
    assert seen["moments"] == moments, name
    assert seen["averages"] == {ON_GPU: trained}, name
    assert seen["decoded_on"] == ["cuda"], name
    kinds = seen["parameters"]
    assert kinds.pop(f"trained {ON_GPU}") == trained, name
    vae = "cpu" if options.speed.offload_vae else "cuda:0"
    expected = {"frozen torch.bfloat16 cuda:0", f"frozen torch.float32 {vae}"}
    if options.pretrained.quantize:
        expected.add("frozen torch.uint8 cuda:0")
    assert set(kinds) == expected, name
    peaks = seen["peaks"]
    estimated = seen["estimated"]
    pairs = {
        "sample": max(estimated["encode"], estimated["sample"]),
        "train": max(estimated["train"], estimated["update"]),
        "evaluate": max(estimated["evaluate"], estimated["show"]),
    }
    for phase, gib in pairs.items():
        # The estimate adds the largest layer in 4 bits, decoded, to every peak.
        least = 0.9 if options.pretrained.quantize else 0.97
        assert least * gib < peaks[phase] < 1.03 * gib, (name, phase, peaks, estimated)
    assert max(peaks.values()) + RESERVE / GIB < seen["gib"], (name, peaks)


@pytest.mark.slow
def test_an_epoch_with_two_blocks_of_each_kind(tmp_path):
    (seen,) = run(tmp_path, step("t2is_80gb", 2))
    check_step(seen)


@pytest.mark.slow
def test_attention_rewards_and_judge(tmp_path):
    calls = [["attention"], ["rewards", str(tmp_path)], ["judge_step", 2, 1]]
    attention, rewards, judge = run(tmp_path, *calls)
    # The backward of cuDNN's, PyTorch's default on an H100, returns NaN for some masked inputs.
    assert attention == {"default": CUDNN, "run": FUSED}
    assert set(rewards.values()) == {2} and len(rewards) == 4
    check_judge(judge)
    assert judge["trained"] == 2 * 2 * 7  # A and B of every linear layer


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "default"), [(89, FUSED), (100, CUDNN)])
def test_attention_of_other_cards(tmp_path, capability, default):
    (seen,) = run(tmp_path, ["attention"], capability=capability)
    assert seen == {"default": default, "run": FUSED}


def check_judge(seen: dict[str, Any]) -> None:
    assert seen["gradients"] == seen["moments"] == [ON_GPU]
    assert seen["parameters"] == ["False torch.bfloat16 cuda:0", f"True {ON_GPU}"]


@pytest.mark.long
def test_the_published_batch_of_the_judge_fits_80_gb(tmp_path):
    (seen,) = run(tmp_path, ["judge_step", 28, 8])
    check_judge(seen)
    # What the other 30 blocks of the vision tower and CUDA itself take.
    assert seen["peak_gib"] + 1.2 + 1.5 < 79.2


@pytest.mark.long
def test_an_epoch_with_all_blocks(tmp_path):
    (seen,) = run(tmp_path, step("t2is_80gb", None))
    check_step(seen)


@pytest.mark.long
def test_other_epochs_with_two_blocks(tmp_path):
    for seen in run(tmp_path, *[step(name, 2) for name in MORE]):
        check_step(seen)


@pytest.mark.long
def test_fsdp2_shards_the_base_inside_a_machine(tmp_path):
    full = ["sharded", "t2is", 8, 2, "--config.use_lora=False"]
    one, two, everything = run(tmp_path, *[["sharded", "t2is", n, 2] for n in (8, 16)], full)
    assert one["mesh"] == [8] and two["mesh"] == [2, 8]
    for seen in (one, two):
        assert seen["base_sharded"] and seen["adapter_whole"]
        assert seen["base_here"] == pytest.approx(seen["base"] / 8, rel=0.01)
        assert seen["base_kinds"] == ["torch.bfloat16 cuda:0"]
        assert seen["adapter_kinds"] == [ON_GPU]
        assert seen["gradients"] == seen["trained"] > 0
        assert 0.9 < seen["train_gib"] / seen["expected_gib"] < 1.03
    assert everything["base_kinds"] == [ON_GPU]
    assert everything["gradients"] == everything["trained"] > 0


@pytest.mark.long
def test_blocks_of_flux_compile_to_binaries_of_two_cards(tmp_path):
    (seen,) = run(tmp_path, ["compiled", "t2is", str(tmp_path), [90, 89]])
    kernels = seen["kernels"]
    assert len(kernels) == 4 and min(kernels.values()) > 0  # two classes, sampling and training
    total = sum(kernels.values())
    assert seen["binaries"] == {"90": total, "89": total}
