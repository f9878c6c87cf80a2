"""However weights are spread over however many processes: the same advantages, losses and weights;
and memory shared.
"""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import tiny_policies as policies
import torch
from accelerate import DistributedType
from forked_runs import (
    COMPARABLE,
    TOLERANCE,
    assert_same_training,
    observed,
    rows,
    run_to_end,
    state,
)
from safetensors.torch import load_file
from tiny_run import tiny_options, write_rows

from paco_grpo import distributed
from paco_grpo.distributed import Shares, build_strategy, interleave, main_decides
from paco_grpo.policies.adapters import save_peft
from paco_grpo.training.build import build_run

PPO = {"train__loss_type": "ppo", "train__beta": 0.01}
FULL = {"use_lora": False, "train__learning_rate": 1e-3}
FSDP2 = {"train__sharding": "fsdp2"}
RESUMED = FULL | FSDP2 | {"save_freq": 1}
TRANSFORMER = "runs/run/checkpoints/epoch_0002/transformer"
WEIGHTS = "diffusion_pytorch_model.safetensors"


def write_uneven_prompts(folder: Path) -> None:
    """Items of two shapes, so that processes differ in their number of batches."""
    for split, count in (("train", 5), ("test", 3)):
        rows = []
        for i in range(count):
            prompt = f"{i}{split} 1x2 grid. [LEFT]: a. [RIGHT]: b."
            rows.append({"prompt": prompt, "height": 16, "width": 64 if i % 3 else 16})
        write_rows(folder, split, rows)


@pytest.fixture(scope="module")
def trained(tiny_flux_dir, tmp_path_factory):
    """Folder of a finished run of so many processes; each is run once."""
    done = {}

    def of(processes: int, uneven: bool = False, **changes):
        key = (processes, uneven, *sorted(changes.items()))
        if key not in done:
            done[key] = tmp_path_factory.mktemp("run")
            options = COMPARABLE | changes
            if uneven:
                write_uneven_prompts(done[key] / "prompts")
                options |= {"sample__unique_sample_num_per_epoch": 4}
                options |= {"train__reward_fn": "{'reward_factories:gaps': 1}"}
            run_to_end(tiny_flux_dir, done[key], processes, **options)
        return done[key]

    return of


@pytest.fixture(scope="module")
def taught(tiny_flux_dir, tmp_path_factory):
    """Options of a run with a teacher."""
    teacher = tmp_path_factory.mktemp("teacher")
    save_peft(policies.trained("flux", tiny_flux_dir), teacher)
    return {"train__loss_type": "opd", "train__opd_teachers": f"{{one: {teacher}}}"}


def test_each_image_has_one_process_and_one_number():
    """Seven images on three processes."""
    rows = np.arange(7)[:, None]
    parts = []
    for process in range(3):
        shares = Shares(process, 3, 7)
        for number, position in enumerate(shares.positions):
            assert (shares.owner(position), shares.number_of(position)) == (process, number)
        parts.append(rows[shares.positions])
    np.testing.assert_array_equal(interleave(parts), rows)


# What ``build_strategy`` asks of accelerate.
CPUS = SimpleNamespace(distributed_type=DistributedType.MULTI_CPU, num_processes=2)


def test_which_strategy_is_chosen(tiny_flux_dir, tmp_path, caplog):
    assert build_strategy(tiny_options(tiny_flux_dir, tmp_path), CPUS).name == "replicated"
    assert build_strategy(tiny_options(tiny_flux_dir, tmp_path, **FSDP2), CPUS).name == "fsdp2"
    build_run(tiny_options(tiny_flux_dir, tmp_path, **FSDP2))
    assert "config.train.sharding='fsdp2'" in caplog.text


def test_an_error_of_the_main_process_ends_all(monkeypatch):
    """The others wait for a message, so it is sent before it is raised."""
    error = OSError("disk is full")
    sent = []
    monkeypatch.setattr(
        distributed, "broadcast_object_list", lambda both: sent.append(both) or both
    )
    with pytest.raises(OSError, match="disk is full"):
        main_decides(
            SimpleNamespace(is_main_process=True, num_processes=2), Mock(side_effect=error)
        )
    assert sent == [[None, error]]
    monkeypatch.setattr(distributed, "broadcast_object_list", lambda _: [None, error])
    with pytest.raises(OSError, match="disk is full"):
        main_decides(SimpleNamespace(is_main_process=False, num_processes=2), Mock())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [{}, FSDP2], ids=["ddp", "fsdp2"])
def test_more_processes_change_nothing(trained, strategy):
    assert_same_training(trained(1, **PPO), trained(2, **PPO, **strategy))


@pytest.mark.slow
def test_each_process_holds_its_part_of_the_base(trained):
    folder = trained(2, **PPO, **FSDP2)
    parts = [observed(folder, rank) for rank in range(2)]
    assert sum(part["base_here"] for part in parts) == parts[0]["base"]
    assert all(part["sharded"] == [True] and part["lora_whole"] for part in parts)
    # rows are not divisible in every matrix, so parts are equal up to a few rows
    assert max(part["base_here"] for part in parts) < 1.1 * parts[0]["base"] / 2


@pytest.mark.slow
def test_gradients_of_sharded_weights_are_sums(tiny_flux_dir, tmp_path):
    """Of all weights, where nothing is whole on a process: in one optimizer step, whose size does
    not show the gradient's.
    """
    changes = COMPARABLE | FULL | {"num_epochs": 1, "save_freq": 0, "test__num_images": 1}
    changes |= {"train__gradient_step_per_epoch": 1, "sample__num_images_per_prompt": 4}
    norms = []
    for processes, sharding in ((1, {}), (2, FSDP2)):
        folder = tmp_path / str(processes)
        run_to_end(tiny_flux_dir, folder, processes, **changes | sharding)
        norms.append(rows(folder)[0]["train/grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=2e-3)


@pytest.mark.long
def test_uneven_work_does_not_hang_and_changes_nothing(trained):
    """Two image sizes, and no scores for odd items: processes differ in their batches of sampling,
    training and evaluation; where a forward is a collective operation, those with fewer batches
    join the others'.
    """
    changes = PPO | {"enable_gradient_checkpointing": True, "sample__batch_size": 2}
    one = trained(1, uneven=True, **changes)
    assert_same_training(one, trained(2, uneven=True, **changes, **FSDP2))


@pytest.mark.long
@pytest.mark.parametrize("loss_type", ["own_objectives:Extremes", "dpo", "crd", "opd"])
def test_left_out_compared_and_taught_images(trained, taught, loss_type):
    """Of each group, over both processes; one of them may train more images than the other."""
    changes = taught | {"train__loss_type": loss_type, "train__beta": 0.01}
    changes |= {"train__num_sigmas": 2, "train__sigma_fraction": 1}
    changes |= {"sample__batch_size": 2, "train__crd_beta": 0.5}
    one = trained(1, uneven=True, **changes)
    assert_same_training(one, trained(2, uneven=True, **changes, **FSDP2))


@pytest.mark.long
def test_training_everything(trained):
    """Without LoRA, parameters, gradients and optimizer are sharded too."""
    one = trained(1, **FULL)
    two = trained(2, **RESUMED)
    assert_same_training(one, two)
    assert observed(two)["optimizer_here"] < 0.6 * observed(one)["optimizer_here"]
    alone = one / TRANSFORMER
    sharded = two / TRANSFORMER
    assert (alone / "config.json").read_text() == (sharded / "config.json").read_text()
    torch.testing.assert_close(
        load_file(sharded / WEIGHTS), load_file(alone / WEIGHTS), rtol=0, atol=TOLERANCE
    )


@pytest.mark.long
def test_each_of_two_machines_holds_the_whole_base(trained):
    """So weights travel inside a machine; gradients are summed over both."""
    folder = trained(4, **FULL, **FSDP2, machines=2)
    assert_same_training(trained(1, **FULL), folder)
    parts = [observed(folder, rank) for rank in range(4)]
    assert sum(part["base_here"] for part in parts) == 2 * parts[0]["base"]


@pytest.mark.long
@pytest.mark.parametrize("trains_all", [True, False])
def test_resume_is_bit_identical(trained, taught, tiny_flux_dir, trains_all):
    """Of all weights, and of an adapter beside its teacher."""
    changes = RESUMED if trains_all else taught | FSDP2 | {"save_freq": 1}
    whole = trained(2, **changes)
    half = trained(2, **changes, num_epochs=1)
    run_to_end(tiny_flux_dir, half, 2, **COMPARABLE | changes, resume_from="latest")
    assert state(whole, 2) == state(half, 2)


@pytest.mark.long
@pytest.mark.parametrize("strategy", [{}, FSDP2], ids=["ddp", "fsdp2"])
def test_losses_of_more_processes_differ_by_rounding_alone(trained, taught, strategy):
    """At the first weights, and after four optimizer steps.

    Advantages do not enter a teacher's loss, and batches of one are computed alike on one process
    and on two.
    """
    changes = taught | {"num_epochs": 5, "save_freq": 0, "test__num_images": 1}
    changes |= {"train__gradient_step_per_epoch": 1, "train__learning_rate": 1e-3}
    changes |= {"sample__batch_size": 1, "train__batch_size": 1}
    one = [row["train/loss"] for row in rows(trained(1, **changes)) if row["phase"] == "train"]
    folder = trained(2, **changes, **strategy)
    two = [row["train/loss"] for row in rows(folder) if row["phase"] == "train"]
    assert two[0] == pytest.approx(one[0], rel=1e-6)
    assert two[4] == pytest.approx(one[4], rel=1e-4)
    assert one[4] < 0.99 * one[0]


@pytest.mark.long
def test_training_everything_in_bfloat16(trained, tiny_flux_dir):
    """Sharded weights are gathered in bfloat16, and stay float32: a step is what it was."""
    changes = FULL | {"mixed_precision": "bf16", "save_freq": 1}
    before = load_file(Path(tiny_flux_dir, "transformer", WEIGHTS))
    one = load_file(trained(1, **changes) / TRANSFORMER / WEIGHTS)
    two = load_file(trained(2, **changes, **FSDP2) / TRANSFORMER / WEIGHTS)
    moved = torch.cat([(one[name] - before[name]).flatten() for name in before])
    apart = torch.cat([(two[name] - one[name]).flatten() for name in before])
    assert apart.norm() < 0.01 * moved.norm()
