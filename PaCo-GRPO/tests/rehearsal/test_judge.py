"""Judge training on the fake GPU: LLaMA-Factory's run with our overlay, at its base's widths."""

from pathlib import Path

import pytest

from paco_grpo.rehearsal import judge
from paco_grpo.rehearsal.plan import GIB, GPUS

CONFIG = Path(__file__).resolve().parents[3] / "PaCo-Reward" / "config"
pytestmark = pytest.mark.alone  # PyTorch's answers about CUDA are replaced for the process


def test_a_step_of_judge_training(capsys):
    """With one block in each tower and small images."""
    found = judge.rehearse_judge(CONFIG / "paco_reward_lora.yaml", processes=2, pixels=56 * 56, blocks=1)
    assert (found.rows, found.micro_batches, found.sequences) == (8, 4, 64)
    forward, backward, optimizer = found.work
    assert backward.each.flops > forward.each.flops > 0  # activations are recomputed, weights are frozen
    assert optimizer.each.kernels > 0 and optimizer.each.flops == 0
    # logits of the answer alone: all of a pair's tokens would take a gigabyte for 8 pairs
    assert found.adds["forward"]["forward"] + found.adds["forward"]["kept for backward"] < 8 * 4 * found.tokens * 152_064
    # and no activations of the frozen vision tower, 0.18 MB a token and block; of the language model one input a block
    larger = judge.rehearse_judge(CONFIG / "paco_reward_lora.yaml", processes=2, pixels=448 * 448, blocks=1)
    kept = [each.adds["forward"]["kept for backward"] for each in (found, larger)]
    assert kept[1] - kept[0] < 8 * (larger.tokens - found.tokens) * 100_000
    config = CONFIG / "paco_reward_lora_16gb.yaml"
    assert judge.report(config, ["no_such_key=1"], 1, None, GPUS["H100 80GB"], "H100 80GB") == 2
    assert "no_such_key" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["qwen3_vl_4b", "qwen3_vl_8b"])
def test_a_step_of_newer_families(name):
    found = judge.rehearse_judge(CONFIG / f"paco_reward_{name}.yaml", pixels=256 * 256, blocks=1)
    assert 2 * 64 < found.tokens < 2 * 64 + 800  # of 32 x 32 px, a long question and its answer
    assert found.resident["adapter"] > 0 and found.work[1].each.flops > found.work[0].each.flops


def test_unknown_sizes_are_an_error(capsys):
    file = CONFIG / "paco_reward_qwen3_5.yaml"
    assert judge.report(file, [], 1, None, GPUS["H100 80GB"], "H100 80GB") == 2
    assert "the sizes of Qwen/Qwen3.5-9B are not known here" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "gpu", "weights"),
    [
        ("lora", "H100 80GB", 15.4),
        ("lora_16gb", "RTX 4090 24GB", 5.5),
        ("qwen3_vl_4b", "H100 80GB", 8.3),
        ("qwen3_vl_8b", "H100 80GB", 16.3),
    ],
)
def test_the_recipes_at_full_depth(name, gpu, weights, capsys):
    """Two images of two megapixels: the largest pair."""
    file = CONFIG / f"paco_reward_{name}.yaml"
    found = judge.rehearse_judge(file, processes=2)
    assert found.resident["weights"] / GIB == pytest.approx(weights, rel=0.1)
    assert found.tokens > 4000 and "GiB" in found.text(GPUS[gpu], gpu)
