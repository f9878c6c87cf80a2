"""Named configurations hold the values of docs/method.md §7."""

import pytest
from named import load

from paco_grpo.options import OPTIONS
from paco_grpo.training.plan import make_plan

FLUX = "black-forest-labs/FLUX.1-dev"
PUBLISHED = {
    "pretrained.model": FLUX,
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
KONTEXT = EDITING | {
    "pretrained.model": "black-forest-labs/FLUX.1-Kontext-dev",
    "sample.num_steps": 8,
    "sample.noise_steps": (1,),
    "sample.noise_level": 0.9,
    "sample.guidance_scale": 2.5,
    "sample.negative_prompt": None,
}
QWEN = EDITING | {
    "pretrained.model": "Qwen/Qwen-Image-Edit",
    "sample.num_steps": 10,
    "sample.noise_steps": (1, 2, 3, 4),
    "sample.noise_level": 1.0,
    "sample.guidance_scale": 4.0,
    "sample.negative_prompt": " ",  # true CFG
}


ONE_IMAGE = {
    "pretrained.model": FLUX,
    "train.resolution": 256,
    "test.resolution": 512,
    "sample.noise_steps": (1,),
    "prompt_fn": "general_ocr",
}
SDE_FREE = {"sample.noise_level": 0}
AUTHORS = {
    "nft": SDE_FREE
    | {
        "train.num_sigmas": 9,
        "train.sigma_one": True,
        "train.nft_beta": 0.1,
        "train.beta": 1e-4,
        "train.lora_rank": 32,
    },
    "awm": SDE_FREE | {"train.num_sigmas": None, "train.sigma_fraction": 0.9, "train.beta": 3e-3},
    "dgpo": SDE_FREE
    | {"train.sigma_fraction": 0.7, "train.sigma_one": True, "train.lora_alpha": 128},
    "flow_dppo": {
        "sample.noise_level": 0.7,
        "sample.num_noise_steps": 3,
        "sample.noise_steps": (0, 1, 2, 3, 4),
        "train.dppo_divergence": 1e-5,
    },
}


FOR_80GB = {"speed.compile": True, "sample.batch_size": 6, "sample.unique_sample_num_per_epoch": 42}
# What the memory of a GPU may change.
OF_MEMORY = {
    "enable_gradient_checkpointing",
    "pretrained.quantize",
    "sample.batch_size",
    "speed.compile",
    "speed.offload_vae",
    "test.batch_size",
    "train.batch_size",
    "train.reward_fn_kwargs",
}


OF_AUTHORS = {"sample.global_std": True, "train.lora_targets": "attention"}
NO_CFG = {"sample.guidance_scale": 1.0, "sample.negative_prompt": None}
NAMED = {
    **{
        f"t2is_{name}": OF_AUTHORS | changes | {"train.loss_type": name}
        for name, changes in AUTHORS.items()
    },
    "t2is": PUBLISHED,
    "kontext_editing": KONTEXT,
    "qwen_editing": QWEN,
    "qwen_editing_no_cfg": QWEN | NO_CFG,
    "t2is_80gb_fast": FOR_80GB | {"sample.tail_steps": 4},
    "t2is_fast_80gb": FOR_80GB | {"sample.tail_steps": 4},
    "t2is_80gb": FOR_80GB | {"sample.tail_steps": None},
    "t2is_fast_nft": {"train.loss_type": "nft", "sample.tail_steps": 4},
    "editing": {"test.num_images": 256},
    "sd3_ocr": {"test.num_images": 256},
    "ocr": ONE_IMAGE | {"sample.noise_level": 0.8, "train.reward_fn": {"ocr": 1.0}},
    "pickscore": ONE_IMAGE | {"sample.noise_level": 0.7, "train.reward_fn": {"pickscore": 1.0}},
}


def flat(options):
    """Dotted name → value of every option."""
    values = {}
    for name in OPTIONS:
        group, _, field = name.rpartition(".")
        values[name] = getattr(getattr(options, group) if group else options, field)
    return values


@pytest.mark.parametrize("name", NAMED)
def test_named_configuration_is_the_published_table(name):
    values = flat(load(name))
    assert {option: values[option] for option in NAMED[name]} == NAMED[name]


@pytest.mark.parametrize("suffix", ["_24gb", "_48gb", "_80gb"])
@pytest.mark.parametrize(
    "name", ["t2is", "t2is_nft", "kontext_editing", "qwen_editing", "sd3_t2is"]
)
def test_a_suffix_of_memory_changes_memory_and_speed_alone(name, suffix):
    plain = flat(load(name))
    sized = flat(load(name + suffix))
    changed = {option for option in plain if plain[option] != sized[option]}
    assert changed and changed <= OF_MEMORY
    for arguments in sized["train.reward_fn_kwargs"].values():
        assert set(arguments) <= {"model", "device", "dtype"}


def test_the_order_of_suffixes_does_not_matter():
    assert load("t2is_24gb_fast") == load("t2is_fast_24gb")
    assert load("qwen_editing_48gb_nft") == load("qwen_editing_nft_48gb")
    assert load("sd3_ocr_24gb_dgpo_fast") == load("sd3_ocr_fast_dgpo_24gb")


@pytest.mark.parametrize("processes", [1, 2, 4, 7, 8])
def test_the_recipe_for_80_gb_keeps_42_prompts(processes):
    plan = make_plan(load("t2is_80gb"), processes, gradient_steps=2)
    assert (plan.prompts, plan.sample_batch_size) == (42, 6)
