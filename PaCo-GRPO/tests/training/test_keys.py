"""A server's key that is given as an option reaches the reward, and no file and no log."""

import logging
import sys
from types import SimpleNamespace
from unittest.mock import Mock

from tiny_run import load_script, tiny_options

from paco_grpo.monitoring.trackers import Tracker
from paco_grpo.options import describe_options, options_to_yaml
from paco_grpo.rewards.registry import build_rewards, write_records
from paco_grpo.training.build import build_run
from paco_grpo.training.resume import load_state
from paco_grpo.training.trainer import Trainer

KEYED = "reward_factories:keyed"
SECRET = "SECRET-"


def keys(where, key):
    return {f"{where}.reward_fn_kwargs.{KEYED}.api_key": f"{SECRET}{key}"}


def files_with_secret(folder):
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and SECRET.encode() in path.read_bytes():
            found.append(path)
    return found


def as_words(changes):
    return [f"--config.{name}={value}" for name, value in changes.items()]


def test_no_file_has_a_key(tiny_flux_dir, tmp_path, caplog, capfd):
    """Two keys of one reward; the saved configuration takes them again."""
    caplog.set_level(logging.INFO)
    both = keys("train", "train") | keys("test", "test")
    changes = {name.replace(".", "__"): value for name, value in both.items()}
    small = {"num_epochs": 1, "train__reward_fn": f"{{'{KEYED}': 1.0}}"}

    def run(**more):
        trainer = Trainer(
            build_run(tiny_options(tiny_flux_dir, tmp_path, **small | changes | more))
        )
        trainer.fit()
        return trainer.run

    folder = run(logging_platform="tensorboard").folder
    assert (folder / "checkpoints" / "epoch_0001" / "adapter" / "README.md").is_file()
    other = {name: value + "2" for name, value in changes.items()}
    build = tiny_options(tiny_flux_dir, tmp_path, **small | other, resume_from="latest")
    again = build_run(build)
    load_state(again)
    again.close()
    assert "another config.train.reward_fn_kwargs" not in caplog.text

    output = tmp_path / "evaluated"
    command = ["--config", str(folder / "config.yaml"), "--adapter", str(folder / "best")]
    command += ["--output", str(output)]
    assert load_script("evaluate").main(command) == 1  # without the key
    assert "api_key" in capfd.readouterr().err
    assert load_script("evaluate").main([*command, *as_words(both)]) == 0
    assert (output / "evaluation.json").is_file()
    assert (folder / "log.txt").stat().st_size > 0
    assert files_with_secret(tmp_path) == []
    assert SECRET not in caplog.text and SECRET not in capfd.readouterr().err


def test_keys_of_sets_and_within_arguments_are_left_out(tiny_flux_dir, tmp_path):
    datasets = {
        "one": {
            "folder": "x",
            "reward_fn_kwargs": {KEYED: {"api_key": f"{SECRET}a", "of": [{"api_key": SECRET}]}},
        }
    }
    options = tiny_options(tiny_flux_dir, tmp_path, datasets=repr(datasets))
    assert options.datasets["one"].reward_fn_kwargs[KEYED]["api_key"] == f"{SECRET}a"
    assert SECRET not in options_to_yaml(options) + describe_options(options)
    reward = build_rewards({KEYED: 1}, {KEYED: {"api_key": SECRET}})["keyed"]
    assert SECRET not in str(reward.identity())
    write_records({"keyed": reward}, tmp_path)
    assert files_with_secret(tmp_path) == []


def test_trackers_see_no_key_on_the_command_line(tmp_path, monkeypatch):
    seen = []
    init = Mock(side_effect=lambda *_, **__: seen.append(list(sys.argv)))
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    monkeypatch.setenv("SWANLAB_PROBE_RUNTIME", "true")
    monkeypatch.setattr(sys, "argv", ["train.py", "--config=x", f"--config.a.api_key={SECRET}"])
    Tracker("trackio", tmp_path, "p", "r", {})
    assert seen == [["train.py", "--config=x", "--config.a.api_key"]]
