"""README.md's recipes, as they stand there: each block is written to the file it names and used by its import path."""

import dataclasses
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from paco_grpo.training.configuration import apply_overrides, load_config, option_names, parse_command_line
from PIL import Image
from toy_policy import ToyPolicy

from paco_grpo.advantages import compute_advantages
from paco_grpo.advantages.aggregation import get_aggregate_fn
from paco_grpo.evaluation.evaluate import draw
from paco_grpo.objectives import OBJECTIVES, get_objective
from paco_grpo.policies import POLICIES, load_policy
from paco_grpo.rewards.registry import build_rewards
from paco_grpo.sampling.denoise import rollout
from paco_grpo.types import Item

HERE = Path(__file__).resolve().parents[1]
TEXT = (HERE / "README.md").read_text()


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """The README's Python files on the import path."""
    for name, code in re.findall(r"```python\n# (my_\w+\.py)\n(.*?)```", TEXT, flags=re.DOTALL):
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_reward(recipes):
    reward = build_rewards({"my_rewards:brightness": 1.0}, {"my_rewards:brightness": {"scale": 2.0}})["brightness"]
    images = [Image.new("RGB", (8, 8), colour) for colour in ("black", "white")]
    assert reward(images, [Item(i, "x") for i in range(2)]).tolist() == [0.0, 2.0]


def test_aggregation(recipes):
    rewards = {"a": np.array([0.1, 0.9, 0.4, 0.6]), "b": np.array([0.8, 0.2, 0.5, 0.7])}
    result = compute_advantages(rewards, np.array([0, 0, 1, 1]), ["p", "p", "q", "q"], reward_weights={"a": 1.0, "b": 1.0},
                                aggregate_fn=get_aggregate_fn("my_aggregations:worst", {"a": 1.0, "b": 1.0}))  # fmt: skip
    assert np.sign(result.advantages).tolist() == [-1, 1, -1, 1]


def test_objective(recipes, monkeypatch):
    monkeypatch.setitem(OBJECTIVES, "reinforce", "my_objectives:reinforce_loss")
    policy = ToyPolicy(torch.float64)
    record = rollout(policy, policy.encode([Item(i, str(i)) for i in range(3)]), range(3), [1, 2, 3], 8, 12, num_steps=4,
                     noise_steps=(0, 2), noise_level=0.8)  # fmt: skip
    weights = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    record = dataclasses.replace(
        record, advantages=torch.tensor([1.0, -0.5, 9.0], dtype=torch.float64), weights=weights
    )
    loss, metrics = get_objective("reinforce")(record, policy, SimpleNamespace())
    expected = -(record.advantages * record.log_prob.double().mean(1) * weights).sum()
    assert loss.item() == pytest.approx(float(expected), rel=1e-5)
    loss.backward()
    assert policy.transformer.current.grad.abs().sum() > 0 and "policy_loss" in metrics


def test_generator(recipes, monkeypatch, tiny_flux_dir):
    item, images = Item(0, "a red star"), []
    for target in (POLICIES["FluxPipeline"], "my_policies:MyPolicy"):
        monkeypatch.setitem(POLICIES, "FluxPipeline", target)
        policy = load_policy(tiny_flux_dir, max_sequence_length=16)
        assert type(policy).__name__ == target.partition(":")[2]
        images += draw(policy, [item], [3], 32, 48, 2)
    assert images[0].size == (48, 32)
    assert np.abs(np.asarray(images[0], int) - np.asarray(images[1], int)).max() <= 1


def commands() -> list[list[str]]:
    """Words of every line of the README that starts a training, from the configuration's name on."""
    started = re.findall(r"bash scripts/\w+_node/train_\w+\.sh (.*)", TEXT.replace("\\\n", " "))
    return [shlex.split(arguments.replace("runs/NAME/config.yaml", "t2is"), comments=True) for arguments in started]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_name_configurations_and_options_that_exist(words):
    source, overrides = parse_command_line(["--config", f"{HERE}/config/grpo.py:{words[0]}", *words[1:]])
    apply_overrides(load_config(source, HERE / "config" / "base.py"), overrides)


def test_scripts_exist():
    named = set(re.findall(r"scripts/\w+/\w+\.sh", TEXT))
    assert len(named) >= 3 and all((HERE / name).is_file() for name in named)


def test_named_options_exist():
    options = set(option_names(load_config(f"{HERE}/config/grpo.py:t2is", HERE / "config" / "base.py")))
    named = re.findall(r"`(?:config\.)?((?:train|sample|test|health|pretrained)\.\w+)", TEXT)
    named += re.findall(r"`config\.(\w+)[`=]", TEXT)
    assert len(named) > 20
    groups = {key.partition(".")[0] for key in options if "." in key}
    assert [key for key in named if key not in options | groups] == []
