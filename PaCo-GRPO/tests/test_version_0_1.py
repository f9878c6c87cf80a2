"""What version 0.1 (commit 8526f20) wrote still loads: a run with its checkpoint, adapters, a user's reward file."""

import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import overrides_for, train

from paco_grpo.moved import MOVED
from paco_grpo.options import load_options
from paco_grpo.policies import load_policy
from paco_grpo.rewards.registry import build_rewards
from paco_grpo.training.build import load_adapter
from paco_grpo.types import Item

OLD = Path(__file__).parent / "version_0_1"
CHECKPOINT = OLD / "run" / "checkpoints" / "epoch_0001"


def test_a_run_resumes_to_the_same_weights(tiny_flux_dir, tmp_path):
    shutil.copytree(OLD / "run", tmp_path / "runs" / "run")
    places = overrides_for(tiny_flux_dir, tmp_path)
    changes = {name: places[name] for name in ("pretrained.model", "dataset", "save_dir")}
    changes |= {"num_epochs": "2", "resume_from": "latest"}
    options = load_options(str(tmp_path / "runs" / "run" / "config.yaml"), changes.items())
    assert (options.train.loss_type, options.train.lora_rank, options.run_name) == ("nft", 1, "run")
    run = train(options).run
    expected = load_file(OLD / "epoch_0002_trainable.safetensors")
    before = load_file(CHECKPOINT / "state" / "trainable.safetensors")
    assert expected.keys() == run.state.parameters.keys()
    for name, value in expected.items():
        # matrix products may round differently on other machines
        torch.testing.assert_close(run.state.parameters[name].detach(), value, rtol=0, atol=1e-6)
    assert max(float((expected[name] - before[name]).abs().max()) for name in expected) > 1e-4
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows if row["phase"] == "train"] == [1, 2]


@pytest.mark.parametrize("place", ["", "adapter", "diffusers"])
def test_an_adapter_loads(tiny_flux_dir, place):
    policy = load_policy(tiny_flux_dir)
    load_adapter(policy, str(CHECKPOINT / place))
    average = load_file(CHECKPOINT / "state" / "ema.safetensors")
    loaded = {n: p for n, p in policy.transformer.named_parameters() if "lora_" in n}
    assert loaded.keys() == average.keys()
    assert all(torch.equal(loaded[name].detach(), value) for name, value in average.items())


def test_a_users_configuration_file(tmp_path):
    """Its tables were made by ``open_dict``, and base.py was loaded by its path."""
    shutil.copy(OLD.parents[1] / "config" / "base.py", tmp_path)
    (tmp_path / "mine.py").write_text(
        "import runpy, pathlib\n"
        "base = runpy.run_path(str(pathlib.Path(__file__).with_name('base.py')))\n"
        "def get_config(name=''):\n"
        "    config = base['get_config']()\n"
        "    config.train.reward_fn = base['open_dict'](ocr=1.0)\n"
        "    config.train.reward_fn.ocr = 0.5\n"
        "    return config\n"
    )
    assert load_options(f"{tmp_path / 'mine.py'}:x").train.reward_fn == {"ocr": 0.5}


def test_a_users_reward_file(monkeypatch):
    from PIL import Image

    monkeypatch.syspath_prepend(str(OLD))
    (reward,) = build_rewards({"my_rewards:blueness": 1.0}, {"my_rewards:blueness": {"scale": 2.0}}).values()
    assert reward([Image.new("RGB", (4, 4), "blue")], [Item(0, "x")]).tolist() == [2.0]


@pytest.mark.parametrize("old", MOVED)
def test_an_old_import_path_names_the_new_one(old):
    with pytest.raises(ModuleNotFoundError, match="moved in version 0.2: see ") as caught:
        importlib.import_module(f"paco_grpo.{old}")
    new = str(caught.value).partition("see ")[2].split(" ")[0]
    if new.startswith("scripts/"):
        assert (Path(__file__).parents[1] / new).is_file()
    else:
        importlib.import_module(new.rstrip(","))
