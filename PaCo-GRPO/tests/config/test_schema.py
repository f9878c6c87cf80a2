"""Every option is documented, read by the trainer, and never changed."""

import dataclasses
import runpy
import sys
from pathlib import Path

import pytest
from tiny_policies import trained
from tiny_run import tiny_options, train

from paco_grpo.objectives import OBJECTIVES
from paco_grpo.options import OPTIONS
from paco_grpo.options.schema import GROUPS, RunOptions
from paco_grpo.policies.adapters import save_peft

REPOSITORY = Path(__file__).resolve().parents[3]
PAGE = runpy.run_path(str(REPOSITORY / "tools" / "options_page.py"))["page"]()
# They refuse or compare values. An option that nothing else reads does nothing.
CHECKS = ("paco_grpo.options", "paco_grpo.training.checks", "paco_grpo.training.resume")
# The file of resuming acts on them, too.
READ_BY_CHECKS = {"resume_changed"}

SMALL = {
    "num_epochs": 1,
    "save_freq": 0,
    "health__probe_images": 0,
    "sample__num_images_per_prompt": 2,
    "train__num_sigmas": 1,
}
RUNS = {name: {} for name in OBJECTIVES}
RUNS["dgpo"] = {"train__dgpo_reference": "slow"}
RUNS["ppo"] = {"sample__num_noise_steps": 1, "sample__window_epochs": 1}


@pytest.fixture
def options_read(monkeypatch) -> set[str]:
    """Fills up with the options that modules other than ``CHECKS`` read."""
    names = set()

    def watch(group: type, prefix: str) -> None:
        fields = {field.name for field in dataclasses.fields(group)}
        read = group.__getattribute__

        def watched(options, name):
            if name in fields:
                frame = sys._getframe(1)
                module = frame.f_globals["__name__"]
                is_check = module.startswith(CHECKS) or frame.f_code.co_name == "check"
                if module.startswith("paco_grpo.") and not is_check:
                    names.add(prefix + name)
            return read(options, name)

        monkeypatch.setattr(group, "__getattribute__", watched)

    watch(RunOptions, "")
    for name, group in GROUPS.items():
        watch(group, f"{name}.")
    return names


def test_every_option_is_read(options_read, tiny_flux_dir, tmp_path):
    policy = trained("flux", tiny_flux_dir)
    save_peft(policy, tmp_path / "teacher")
    teachers = {"train__opd_teachers": f"{{one: {tmp_path / 'teacher'}}}"}
    for name, changes in RUNS.items():
        changes = teachers | changes
        changes = SMALL | {"train__loss_type": name} | changes
        train(tiny_options(tiny_flux_dir, tmp_path / name, **changes))
    assert set(OPTIONS) - options_read == READ_BY_CHECKS


def test_configuration_page_is_current():
    assert (REPOSITORY / "docs" / "configuration.md").read_text() == PAGE
    assert all(option.description for option in OPTIONS.values())
