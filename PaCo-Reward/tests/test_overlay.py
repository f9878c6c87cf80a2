"""The overlay inside LLaMA-Factory: loss in every process, LLaMA-Factory's own loss, metrics, templates."""

import importlib.metadata

import numpy as np
import pytest
import torch
from training_tools import adapter, losses, run_processes, train_config

from paco_reward import overlay
from paco_reward.errors import PacoRewardError
from paco_reward.loss import find_answers

# Trains several configurations in one process: the first two with upstream alone.
SEVERAL = """
import sys, yaml
from llamafactory.train.tuner import run_exp
for file in sys.argv[1:3]:
    run_exp(yaml.safe_load(open(file)))
from paco_reward.launch import train
for file in sys.argv[3:]:
    train(yaml.safe_load(open(file)))
"""


@pytest.fixture(scope="module")
def installed():
    overlay.install()


def test_an_untested_version_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.9")
    with pytest.raises(PacoRewardError, match=r"llamafactory==0\.9\.5"):
        overlay.install()


def test_a_damaged_training_image_is_named(installed, tiny, tmp_path):
    from llamafactory.data.mm_plugin import get_mm_plugin

    tiny.picture(1).save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:-40])
    plugin = get_mm_plugin("qwen2_vl", image_token="<|image_pad|>")
    with pytest.raises(OSError, match=r"cut\.png cannot be read"):
        plugin._regularize_images(
            [str(tmp_path / "cut.png")], image_max_pixels=1 << 20, image_min_pixels=1
        )


def test_answer_statistics(tiny):
    """Against loops over one batch, left and right padded."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, 8, generator=generator)
    labels = torch.tensor(
        [[-100, -100, 5, 1, -100, -100], [-100, -100, -100, -100, 6, 2], [-100] * 6]
    )
    found = overlay.answer_statistics((logits, None), labels, yes_id=5, no_id=6)
    picked = logits[:, :-1][find_answers(labels).mask]
    assert torch.equal(
        overlay.answer_statistics(picked, labels, yes_id=5, no_id=6).nan_to_num(9),
        found.nan_to_num(9),
    )
    assert overlay.answer_statistics(picked[:0], labels[2:], yes_id=5, no_id=6).isnan().all()
    for row, start, label in ((0, 2, 1.0), (1, 4, 0.0)):
        guesses = logits[row].argmax(-1)
        right = [float(guesses[t - 1] == labels[row, t]) for t in (start, start + 1)]
        yes, no = logits[row, start - 1, [5, 6]].exp()
        torch.testing.assert_close(
            found[row], torch.tensor([sum(right) / 2, right[0], yes / (yes + no), label])
        )
    assert found[2].isnan().all()


@pytest.fixture(scope="module")
def trained(judge_dir, data_dir, tmp_path_factory):
    """Several trainings in one process: a folder of outputs by name. Steps are 8 sequences."""
    folder = tmp_path_factory.mktemp("trained")

    def config(name, **changes):
        return train_config(judge_dir, data_dir, folder / name, **changes)

    accumulated = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    all_at_once = {"max_steps": 1, "first_token_weight": 0.1}
    packed = {
        "neat_packing": True,
        "packing": True,
        "cutoff_len": 4096,
        "per_device_train_batch_size": 1,
    }
    configs = [
        config("upstream", **accumulated),
        config("upstream_dft", use_dft_loss=True, **accumulated),
        config("null", first_token_weight=None, **accumulated),
        config("null_dft", use_dft_loss=True, **accumulated),
        config("sequence", first_token_weight=0.1, **accumulated),
        config("whole", first_token_weight=0.1),
        config("released", first_token_weight=0.1, first_token_scheme="released", **accumulated),
        config("sixteen", per_device_train_batch_size=16, **all_at_once),
        config("packed", **all_at_once, **packed),
    ]
    run_processes(["-c", SEVERAL], configs, folder)
    return folder


def assert_same_training(found, reference):
    """Weights (after plain gradient descent: they show the gradients) and logged losses agree."""
    expected, weights = adapter(reference), adapter(found)
    assert max(np.abs(value).max() for name, value in expected.items() if "lora_B" in name) > 1e-3
    for key, value in expected.items():
        np.testing.assert_allclose(weights[key], value, atol=2e-6, err_msg=key)
    np.testing.assert_allclose(losses(found), losses(reference), atol=1e-4)


@pytest.mark.slow
def test_null_is_llama_factorys_own_loss_bit_for_bit(trained):
    for loss in ("", "_dft"):  # of the other losses that LLaMA-Factory offers, one
        assert losses(trained / f"upstream{loss}") == losses(trained / f"null{loss}")
        upstream, overlaid = (adapter(trained / f"{name}{loss}") for name in ("upstream", "null"))
        assert all(np.array_equal(upstream[name], overlaid[name]) for name in upstream)
    upstream, weighted = adapter(trained / "upstream"), adapter(trained / "sequence")
    assert any(np.abs(upstream[name] - weighted[name]).max() > 1e-4 for name in upstream)


@pytest.mark.slow
def test_accumulated_micro_batches_equal_one_batch(trained):
    assert_same_training(trained / "sequence", trained / "whole")


@pytest.mark.slow
def test_packed_answers_equal_separate_rows(trained):
    assert_same_training(trained / "packed", trained / "sixteen")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["sequence", pytest.param("released", marks=pytest.mark.long)])
def test_two_processes_train_as_one(scheme, trained, judge_dir, data_dir, tmp_path):
    """The same micro-batches on two processes: with another loss or divisor on one of them, the weights would differ."""
    changes = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "first_token_scheme": scheme,
    }
    config = train_config(judge_dir, data_dir, tmp_path / "two", first_token_weight=0.1, **changes)
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "-m",
        "paco_reward.launch",
    ]
    run_processes(torchrun, [config], tmp_path)
    assert_same_training(tmp_path / "two", trained / scheme)
