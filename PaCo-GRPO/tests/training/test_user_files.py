"""A user's configuration file with functions and plain tables, from the command line to a resumed run."""

import dataclasses

import pytest
from tiny_run import ROOT, overrides_for, rows_of, train

from paco_grpo.options import ConfigError, load_options
from paco_grpo.training.build import build_run

HEAD = f"""
import importlib.util, sys
sys.path.insert(0, {str(ROOT / "config")!r})
import grpo

def negated(**grouped_rewards):
    return {{key: -values for key, values in next(iter(grouped_rewards.values())).items()}}

def get_config(name=""):
    config = grpo.get_config("toy_t2is")
    config.train.reward_fn = {{"tiny_run:brightness": 1.0, "tiny_run:redness": 0.5}}
    config.train.reward_fn_kwargs = {{"tiny_run:brightness": {{"scale": 2.0}}}}
"""


@pytest.fixture
def options_of(tiny_flux_dir, tmp_path):
    def load(line):
        (tmp_path / "mine.py").write_text(HEAD + f"    {line}\n    return config\n")
        overrides = overrides_for(tiny_flux_dir, tmp_path, num_epochs=1, health__probe_images=0)
        overrides = {key: value for key, value in overrides.items() if not key.startswith(("train.reward_fn", "train.aggregate_fn"))}
        return load_options(str(tmp_path / "mine.py"), [*overrides.items(), ("train.reward_fn.tiny_run:redness", "0")])

    return load


def test_a_function_of_a_configuration_file_is_found_again_at_resume(options_of):
    options = options_of("config.train.aggregate_fn = negated")
    assert options.train.reward_fn == {"tiny_run:brightness": 1.0, "tiny_run:redness": 0.0}
    first = train(options).run
    again = load_options(str(first.folder / "config.yaml"), [("num_epochs", "2"), ("resume_from", "latest")])
    assert again.train.aggregate_fn.endswith("mine.py:negated")
    assert dataclasses.replace(again, num_epochs=1, resume_from=None) == first.options
    train(again)
    assert [row["epoch"] for row in rows_of(again, "train")] == [1, 2]


def test_a_function_without_an_import_path_is_refused_before_weights_load(options_of, monkeypatch):
    monkeypatch.setattr("paco_grpo.training.build.load_generator", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError, match="config.train.aggregate_fn"):
        build_run(options_of("config.train.aggregate_fn = lambda **rewards: rewards"))
