"""Every family runs an epoch; every objective runs in tests/config/test_schema.py."""

import itertools

import numpy as np
import pytest
import torch
from tiny_policies import FAMILIES
from tiny_run import family_options, rows_of

from paco_grpo.objectives import OBJECTIVES, get_objective
from paco_grpo.training.build import build_run
from paco_grpo.training.trainer import Trainer
from paco_judge.files import read_json_lines

# The two σ of two steps.
BOTH = {"train__num_sigmas": 2, "train__sigma_one": True, "train__sigma_fraction": 1}


def cases():
    """Each family with an objective that draws its own noise; recorded noise: test_families.py."""
    quick = [("flux_kontext", "guard_grpo"), ("qwen_image_edit", "awm")]
    own = [name for name in OBJECTIVES if not get_objective(name).needs_noise_steps]
    pairs = dict.fromkeys([*quick, *zip(FAMILIES, itertools.cycle(own), strict=False)])
    for pair in pairs:
        yield pytest.param(*pair, marks=() if pair in quick else pytest.mark.long)


@pytest.mark.parametrize("name,loss_type", cases())
def test_one_epoch(tiny_folder, tmp_path, name, loss_type):
    more = {} if loss_type == "nft" else BOTH
    config = family_options(
        name, tiny_folder(name), tmp_path, train__loss_type=loss_type, train__beta=0.01, **more
    )
    run = build_run(config)
    before = {n: p.detach().clone() for n, p in run.state.parameters.items()}
    Trainer(run).fit()
    (image,) = read_json_lines(run.folder / "eval" / "epoch_0001" / "eval_data.jsonl")
    assert (image["reference"] is not None) == bool(FAMILIES[name].references)
    (row,) = rows_of(config, "train")
    assert np.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0
    assert row.get("train/ratio_deviation", 0) < 1e-5  # float32, first update: rounding alone
    moved = [n for n, p in run.state.parameters.items() if not torch.equal(p, before[n])]
    assert len(moved) > len(before) // 3
    assert (
        run.folder / "checkpoints" / "epoch_0001" / "diffusers" / "pytorch_lora_weights.safetensors"
    ).is_file()
