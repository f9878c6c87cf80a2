"""Published methods as users write them, in whole runs: nothing of the package is patched."""

import pytest
import torch
from tiny_policies import trained
from tiny_run import rows_of, tiny_options, train

from paco_grpo.policies.adapters import save_peft

SMALL = {"health__probe_images": 0, "num_epochs": 2, "save_freq": 0, "test__num_images": 1}
SIGMA = {"train__num_sigmas": 1, "sample__noise_level": 0}
WINDOW = {"sample__num_steps": 4, "sample__noise_steps": "0,1,2"}
# What a user writes, and the options that are the same.
METHODS = {
    "dance": (
        {"sample__transition": "own_objectives:dance"},
        {"sample__transition": "dance_sde"},
    ),
    "window": (
        WINDOW | {"train__loss_type": "own_objectives:Window"},
        WINDOW | {"sample__num_noise_steps": 2, "sample__window_epochs": 1},
    ),
    "dpo": (
        SIGMA | {"train__loss_type": "own_objectives:FlowDpo", "train__loss_kwargs__strength": 40},
        SIGMA | {"train__loss_type": "dpo", "train__dpo_beta": 40},
    ),
    "opd": (
        {
            "train__loss_type": "own_objectives:Distill",
            "train__loss_kwargs__teacher": "{teacher}",
            "train__gradient_step_per_epoch": 2,
        },
        {
            "train__loss_type": "opd",
            "train__opd_teachers__one": "{teacher}",
            "train__gradient_step_per_epoch": 2,
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_users_version_trains_as_ours(tiny_flux_dir, tmp_path, method):
    save_peft(trained("flux", tiny_flux_dir), tmp_path / "teacher")
    runs = []
    for number, changes in enumerate(METHODS[method]):
        changes = {
            name: str(value).replace("{teacher}", str(tmp_path / "teacher"))
            for name, value in changes.items()
        }
        options = tiny_options(
            tiny_flux_dir, tmp_path, **SMALL | changes, run_name=f"{method}{number}"
        )
        runs.append((train(options).run.state.parameters, rows_of(options, "train")))
    (own, own_rows), (ours, our_rows) = runs
    for name, weight in ours.items():
        torch.testing.assert_close(own[name], weight, rtol=0, atol=2e-6)
    for own_row, our_row in zip(own_rows, our_rows, strict=True):
        for name in ("train/loss", "train/grad_norm"):
            assert own_row[name] == pytest.approx(our_row[name], rel=1e-4, abs=1e-6)
