"""A user's configuration file with functions and plain tables, from the command line to a resumed run."""

import dataclasses

from tiny_run import ROOT, overrides_for, rows_of, train

from paco_grpo.options import load_options

FILE = f"""
import sys
sys.path.insert(0, {str(ROOT / "config")!r})
import grpo

def negated(**grouped_rewards):
    return {{key: -values for key, values in next(iter(grouped_rewards.values())).items()}}

def get_config(name=""):
    config = grpo.get_config("toy_t2is")
    config.train.reward_fn = {{"tiny_run:brightness": 1.0, "tiny_run:redness": 0.5}}
    config.train.reward_fn_kwargs = {{"tiny_run:brightness": {{"scale": 2.0}}}}
    config.train.aggregate_fn = negated
    return config
"""


def test_a_function_of_a_configuration_file_is_found_again_at_resume(tiny_flux_dir, tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    overrides = overrides_for(tiny_flux_dir, tmp_path, num_epochs=1, health__probe_images=0)
    tables = ("train.reward_fn", "train.reward_fn_kwargs", "train.aggregate_fn")
    overrides = {key: value for key, value in overrides.items() if key not in tables} | {"train.reward_fn.tiny_run:redness": "0"}
    options = load_options(str(tmp_path / "mine.py"), overrides.items())
    assert options.train.reward_fn == {"tiny_run:brightness": 1.0, "tiny_run:redness": 0.0}
    first = train(options).run
    again = load_options(str(first.folder / "config.yaml"), [("num_epochs", "2"), ("resume_from", "latest")])
    assert again.train.aggregate_fn.endswith("mine.py:negated")
    assert dataclasses.replace(again, num_epochs=1, resume_from=None) == first.options
    train(again)
    assert [row["epoch"] for row in rows_of(again, "train")] == [1, 2]
