"""Named configurations hold the values of recipes.yaml, and have a guard.

``python tests/config/test_named.py`` writes recipes.yaml again; read its diff.
"""

import sys
from operator import attrgetter
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
from named import FUNCTIONS, SIZED, load, load_with_suffixes

from paco_grpo.objectives import get_objective
from paco_grpo.options import OPTIONS, RunOptions
from paco_grpo.options.parse import options_to_dict
from paco_grpo.training.state import make_plan

COMPLETE = ("t2is", "kontext_editing", "qwen_editing")  # published
RECIPES = Path(__file__).with_name("recipes.yaml")


def changes(options, base):
    """Option → value, as in a saved configuration, where they differ from ``base``."""
    found = {}
    for name in OPTIONS:
        if attrgetter(name)(options) != attrgetter(name)(base):
            group, _, field = name.rpartition(".")
            values = options_to_dict(options)
            found[name] = (values[group] if group else values)[field]
    return found


def recipes():
    """Name → what it sets, of ``COMPLETE`` all options; with a suffix, what that changes."""
    table = {}
    for name in FUNCTIONS:
        options = load(name)
        is_complete = name in COMPLETE
        table[name] = options_to_dict(options) if is_complete else changes(options, RunOptions())
    for name in SIZED:
        bases = [base for base in FUNCTIONS if name.startswith(f"{base}_")]
        table[name] = changes(load(name), load(max(bases, key=len)))
    return table


def test_every_recipe_is_as_it_was_reviewed():
    reviewed = yaml.safe_load(RECIPES.read_text())
    found = recipes()
    assert found.keys() == reviewed.keys()
    for name, values in found.items():
        assert values == reviewed[name], name


def test_every_recipe_has_a_guard():
    """A reward that is evaluated and not trained: without one, no exploited reward is noticed."""
    for name in (*FUNCTIONS, *SIZED):
        options = load(name)
        trained = {reward for reward, weight in options.train.reward_fn.items() if weight}
        assert set(options.test.reward_fn or options.train.reward_fn) - trained, name


def test_no_average_lags_far_behind():
    """What is evaluated and saved is what was trained; test_plan.py has the limit."""
    for name, options in load_with_suffixes():
        for processes in (1, 7, 8):
            gradient_steps = get_objective(options.train.loss_type).gradient_steps
            notes = make_plan(options, processes, gradient_steps).notes
            assert not any("ema_update_interval" in note for note in notes), name


def test_t2is_variety_trains_as_the_quickstart():
    """All but what its docstring names; the toy world has its own judge, prompts and sizes."""
    differing = changes(load("t2is_variety"), load("toy_t2is_nft"))
    assert {name for name in differing if name.startswith(("sample.", "train."))} == {
        "sample.num_steps",
        "sample.batch_size",
        "sample.unique_sample_num_per_epoch",
        "train.resolution",
        "train.batch_size",
        "train.gradient_step_per_epoch",  # None is one for nft
        "train.learning_rate",
        "train.lora_rank",
        "train.lora_alpha",
        "train.lora_targets",
        "train.reward_fn",  # the toy oracle is monitored
        "train.reward_fn_kwargs",
    }


def test_the_order_of_suffixes_does_not_matter():
    assert load("t2is_24gb_fast") == load("t2is_fast_24gb")
    assert load("qwen_editing_48gb_nft") == load("qwen_editing_nft_48gb")
    assert load("sd3_ocr_24gb_dgpo_fast") == load("sd3_ocr_fast_dgpo_24gb")


if __name__ == "__main__":
    RECIPES.write_text(yaml.safe_dump(recipes(), sort_keys=False))
