"""Named configurations hold the values of docs/method.md §7 and of recipes.yaml, and have a guard.

``python tests/config/test_named.py`` writes recipes.yaml again; read its diff.
"""

import sys
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
from named import FUNCTIONS, SIZED, load

from paco_grpo.options import OPTIONS, RunOptions
from paco_grpo.options.parse import options_to_dict

RECIPES = Path(__file__).with_name("recipes.yaml")
PUBLISHED = {
    "pretrained.model": "black-forest-labs/FLUX.1-dev",
    "train.resolution": 512,
    "test.resolution": 1024,
    "sample.num_steps": 10,
    "test.num_steps": 20,
    "sample.noise_steps": (1,),
    "sample.noise_level": 0.7,
    "sample.guidance_scale": 3.5,
    "sample.global_std": True,
    "train.reward_fn": {"consistency_score": 0.2, "subfig_clipT": 1.0, "pickscore": 1.0},
    "sample.num_images_per_prompt": 16,
    "sample.unique_sample_num_per_epoch": 42,
    "train.timesteps": None,  # trained steps are the noise steps
    "train.gradient_step_per_epoch": None,  # the objective's default
    "train.learning_rate": 3e-4,
    "train.adam_weight_decay": 1e-4,
    "train.adam_beta1": 0.9,
    "train.adam_beta2": 0.999,
    "train.adam_epsilon": 1e-8,
    "train.max_grad_norm": 1.0,
    "train.clip_range": 1e-4,
    "train.adv_clip_max": 5.0,
    "train.lora_rank": 64,
    "train.lora_alpha": 128,
    "train.ema_decay": 0.9,
    "train.ema_update_interval": 8,
    "seed": 42,
    "save_freq": 10,
    "eval_freq": 10,
    "num_checkpoint_limit": 5,
    "mixed_precision": "bf16",
    "max_sequence_length": 512,
}
EDITING = {
    "train.resolution": 384,
    "test.resolution": 512,
    "test.num_steps": 20,
    "train.timesteps": None,
    "sample.global_std": False,
    "train.reward_fn": {"consistency_for_editing": 1.0},
    "sample.num_images_per_prompt": 16,
    "sample.unique_sample_num_per_epoch": 42,
    "prompt_fn": "arrow_editing",
}
NAMED = {
    "t2is": PUBLISHED,
    "kontext_editing": EDITING
    | {
        "pretrained.model": "black-forest-labs/FLUX.1-Kontext-dev",
        "sample.num_steps": 8,
        "sample.noise_steps": (1,),
        "sample.noise_level": 0.9,
        "sample.guidance_scale": 2.5,
        "sample.negative_prompt": None,
    },
    "qwen_editing": EDITING
    | {
        "pretrained.model": "Qwen/Qwen-Image-Edit",
        "sample.num_steps": 10,
        "sample.noise_steps": (1, 2, 3, 4),
        "sample.noise_level": 1.0,
        "sample.guidance_scale": 4.0,
        "sample.negative_prompt": " ",  # true CFG
    },
}


def flat(options):
    """Dotted name → value of every option."""
    return {name: attrgetter(name)(options) for name in OPTIONS}


def changes(options, base):
    """Option → value, as in a saved configuration, where they differ from ``base``."""
    found = {}
    for name, value in flat(options).items():
        if value != attrgetter(name)(base):
            group, _, field = name.rpartition(".")
            values = options_to_dict(options)
            found[name] = (values[group] if group else values)[field]
    return found


def recipes():
    """Name → what it sets; with a suffix, what that changes."""
    table = {name: changes(load(name), RunOptions()) for name in FUNCTIONS}
    for name in SIZED:
        if name not in FUNCTIONS:
            bases = [base for base in FUNCTIONS if name.startswith(f"{base}_")]
            table[name] = changes(load(name), load(max(bases, key=len)))
    return table


@pytest.mark.parametrize("name", NAMED)
def test_named_configuration_is_the_published_table(name):
    values = flat(load(name))
    assert {option: values[option] for option in NAMED[name]} == NAMED[name]


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


def test_the_order_of_suffixes_does_not_matter():
    assert load("t2is_24gb_fast") == load("t2is_fast_24gb")
    assert load("qwen_editing_48gb_nft") == load("qwen_editing_nft_48gb")
    assert load("sd3_ocr_24gb_dgpo_fast") == load("sd3_ocr_fast_dgpo_24gb")


if __name__ == "__main__":
    RECIPES.write_text(yaml.safe_dump(recipes(), sort_keys=False))
