"""Named configurations hold the values of docs/method.md §7."""

import pytest
from named import load

FLUX = "black-forest-labs/FLUX.1-dev"
PUBLISHED = {
    "pretrained.model": FLUX, "train.resolution": 512, "test.resolution": 1024, "sample.num_steps": 10,
    "test.num_steps": 20, "sample.noise_steps": (1,), "sample.noise_level": 0.7, "sample.guidance_scale": 3.5,
    "sample.global_std": True, "train.reward_fn": {"consistency_score": 0.2, "subfig_clipT": 1.0, "pickscore": 1.0},
    "sample.num_images_per_prompt": 16, "sample.unique_sample_num_per_epoch": 42,
    "train.timesteps": None,  # trained steps are the noise steps
    "train.gradient_step_per_epoch": None,  # the objective's default
    "train.learning_rate": 3e-4, "train.adam_weight_decay": 1e-4, "train.adam_beta1": 0.9, "train.adam_beta2": 0.999,
    "train.adam_epsilon": 1e-8, "train.max_grad_norm": 1.0, "train.clip_range": 1e-4, "train.adv_clip_max": 5.0,
    "train.lora_rank": 64, "train.lora_alpha": 128, "train.ema_decay": 0.9, "train.ema_update_interval": 8, "seed": 42,
    "save_freq": 10, "eval_freq": 10, "num_checkpoint_limit": 5, "mixed_precision": "bf16", "max_sequence_length": 512,
}  # fmt: skip
EDITING = {
    "train.resolution": 384, "test.resolution": 512, "test.num_steps": 20, "train.timesteps": None,
    "sample.global_std": False, "train.reward_fn": {"consistency_for_editing": 1.0},
    "sample.num_images_per_prompt": 16, "sample.unique_sample_num_per_epoch": 42, "prompt_fn": "arrow_editing",
}  # fmt: skip
KONTEXT = EDITING | {
    "pretrained.model": "black-forest-labs/FLUX.1-Kontext-dev", "sample.num_steps": 8, "sample.noise_steps": (1,),
    "sample.noise_level": 0.9, "sample.guidance_scale": 2.5, "sample.negative_prompt": None,
}  # fmt: skip
QWEN = EDITING | {
    "pretrained.model": "Qwen/Qwen-Image-Edit", "sample.num_steps": 10, "sample.noise_steps": (1, 2, 3, 4),
    "sample.noise_level": 1.0, "sample.guidance_scale": 4.0,
    "sample.negative_prompt": " ",  # true CFG
}  # fmt: skip


ONE_IMAGE = {
    "pretrained.model": FLUX, "train.resolution": 256, "test.resolution": 512, "sample.noise_steps": (1,),
    "prompt_fn": "general_ocr",
}  # fmt: skip
SDE_FREE = {"sample.noise_level": 0}
AUTHORS = {
    "nft": SDE_FREE | {"train.num_sigmas": 9, "train.sigma_one": True, "train.nft_beta": 0.1, "train.beta": 1e-4,
            "train.lora_rank": 32},
    "awm": SDE_FREE | {"train.num_sigmas": None, "train.sigma_fraction": 0.9, "train.beta": 3e-3},
    "dgpo": SDE_FREE | {"train.sigma_fraction": 0.7, "train.sigma_one": True, "train.lora_alpha": 128},
    "flow_dppo": {"sample.noise_level": 0.7, "sample.num_noise_steps": 3, "sample.noise_steps": (0, 1, 2, 3, 4),
                  "train.dppo_divergence": 1e-5},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(
            (
                f"t2is_{name}",
                changes
                | {
                    "train.loss_type": name,
                    "sample.global_std": True,
                    "train.lora_targets": "attention",
                },
            )
            for name, changes in AUTHORS.items()
        ),
        ("t2is", PUBLISHED),
        ("kontext_editing", KONTEXT),
        ("qwen_editing", QWEN),
        (
            "qwen_editing_no_cfg",
            QWEN | {"sample.guidance_scale": 1.0, "sample.negative_prompt": None},
        ),
        ("ocr", ONE_IMAGE | {"sample.noise_level": 0.8, "train.reward_fn": {"ocr": 1.0}}),
        (
            "pickscore",
            ONE_IMAGE | {"sample.noise_level": 0.7, "train.reward_fn": {"pickscore": 1.0}},
        ),
    ],
)
def test_named_configuration_is_the_published_table(name, expected):
    options = load(name)
    for option, value in expected.items():
        group, _, field = option.rpartition(".")
        assert getattr(getattr(options, group) if group else options, field) == value, option
