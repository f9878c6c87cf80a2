"""Named configurations: ``--config config/grpo.py:NAME`` (docs/method.md §7; arXiv 2512.04784).

NAME is a function of this file, or an entry of ``RECIPES`` (other models, memory of a GPU, objectives), or such a name
with a suffix of ``SUFFIXES``: ``klein_t2is_nft``. A function of your own is found by its name, too. All options with their
defaults and meanings: docs/configuration.md.
"""

from collections.abc import Mapping
from functools import reduce
from typing import Any

import numpy as np  # noqa: F401 - for aggregations of your own
from ml_collections import ConfigDict

from paco_grpo.advantages.aggregation import (  # noqa: F401 - for config.train.aggregate_fn
    geometric_mean_aggregate_fn,
    harmonic_mean_aggregate_fn,
    log_tame_aggregate_fn,
    product_aggregate_fn,
    weighted_advantage_sum_aggregate_fn,
)
from paco_grpo.options import config_dict
from paco_grpo.suggest import did_you_mean


def t2is() -> ConfigDict:
    """Text to image set with FLUX.1-dev: train at 512 px, evaluate at 1024 px."""
    config = config_dict()
    config.dataset = "dataset/T2IS"
    config.item_size = "aspect"  # one prompt set serves every resolution
    config.sample.global_std = True
    config.train.reward_fn = {"consistency_score": 0.2, "subfig_clipT": 1.0, "pickscore": 1.0}
    # The judge on this machine's port 8000; elsewhere add "port", "host" or "base_url".
    config.train.reward_fn_kwargs = {"consistency_score": {"model": "PaCo-Reward-7B"}}
    return config


def editing() -> ConfigDict:
    """Common to the editors: train at 384 px, evaluate at 512 px, one reward. Fetch its prompt set first."""
    config = config_dict()
    config.dataset = "dataset/public-sharegpt-4o-image"  # python dataset/fetch.py sharegpt-4o-image
    config.prompt_fn = "arrow_editing"
    config.item_size = "aspect"
    config.train.resolution = 384
    config.test.resolution = 512
    config.train.reward_fn = {"consistency_for_editing": 1.0}
    config.train.reward_fn_kwargs = {"consistency_for_editing": {"model": "PaCo-Reward-7B"}}
    return config


def ocr() -> ConfigDict:
    """Text rendering with FLUX.1-dev: train at 256 px (``ocr_128``, ``ocr_512``: the published study), evaluate at 512 px."""
    config = config_dict()
    config.dataset = "dataset/public-ocr"  # python dataset/fetch.py ocr
    config.prompt_fn = "general_ocr"  # one prompt a line
    config.train.resolution = 256
    config.test.resolution = 512
    config.sample.noise_level = 0.8
    config.train.reward_fn = {"ocr": 1.0}
    return config


# --- recipes: changes to a configuration; a value may be a function of the configuration so far --------------------------

# Four second-order steps after the last noise step: as much gain as with all steps in the toy world (docs/scaling.md).
SHORT_TAIL = {"sample.tail_steps": lambda config: 4 if config.sample.noise_level else None}
# Memory of each phase: scripts/estimate.py. 48 GB: activations are recomputed, the VAE is in main memory between uses.
FOR_48GB = SHORT_TAIL | {"enable_gradient_checkpointing": True, "speed.offload_vae": True}
# 24 GB: also the frozen transformer in 4 bits (QLoRA, arXiv 2305.14314).
FOR_24GB = FOR_48GB | {"pretrained.quantize": "nf4"}
# 80 GB: larger forwards of compiled blocks. 7 divides an epoch of 42 x 16 images on 1, 2, 4 and 8 GPUs.
FOR_80GB = SHORT_TAIL | {
    "speed.compile": True, "sample.batch_size": 7, "train.batch_size": 2, "test.batch_size": 4,
}  # fmt: skip
# The two CLIP models of t2is in half precision leave room for T5; on the CPU, they score while images are sampled.
CLIP_IN_HALF = {
    f"train.reward_fn_kwargs.{name}": {"dtype": "float16"} for name in ("subfig_clipT", "pickscore")
}
CLIP_ON_CPU = {
    f"train.reward_fn_kwargs.{name}": {"device": "cpu"} for name in ("subfig_clipT", "pickscore")
}


def _paper_settings(images: int, prompts: int, rank: int = 32) -> dict[str, Any]:
    """Common to the papers of objectives: size of groups, standard deviation over all images, a LoRA on attention."""
    return {
        "sample.num_images_per_prompt": images, "sample.unique_sample_num_per_epoch": prompts, "sample.global_std": True,
        "train.lora_targets": "attention", "train.lora_rank": rank, "train.lora_alpha": 2 * rank,
    }  # fmt: skip


WITHOUT_NOISE = {"sample.noise_level": 0.0} | SHORT_TAIL
# DiffusionNFT (arXiv 2509.16117), its multi-reward settings: all steps but the last, β = 0.1.
NFT = _paper_settings(24, 48) | WITHOUT_NOISE | {
    "train.loss_type": "nft", "train.num_sigmas": lambda config: config.sample.num_steps - 1, "train.sigma_fraction": 0.99,
    "train.sigma_one": True, "train.nft_beta": 0.1, "train.beta": 1e-4, "train.ema_update_interval": 1,
}  # fmt: skip
# Advantage Weighted Matching (arXiv 2509.25050), with its weight of the KL for text rendering; defaults are the authors'.
AWM = _paper_settings(24, 72) | WITHOUT_NOISE | {
    "train.loss_type": "awm", "train.beta": 3e-3, "train.ema_decay": 0.99, "train.ema_update_interval": 1,
}  # fmt: skip
# DGPO (arXiv 2510.08425), its mode with a frozen reference: σ of the first 70 % of the steps.
DGPO = _paper_settings(24, 24, rank=64) | WITHOUT_NOISE | {
    "train.loss_type": "dgpo", "train.sigma_fraction": 0.7, "train.sigma_one": True, "train.beta": 1e-3,
}  # fmt: skip
# Flow-DPPO (arXiv 2606.11025): three noise steps of the first half, two optimizer steps an epoch.
FLOW_DPPO = _paper_settings(16, 48) | {
    "train.loss_type": "flow_dppo", "sample.num_noise_steps": 3,
    "sample.noise_steps": lambda config: tuple(range(config.sample.num_steps // 2)),
}  # fmt: skip

SUFFIXES = {
    "_24gb": FOR_24GB, "_48gb": FOR_48GB, "_80gb": FOR_80GB, "_nft": NFT, "_awm": AWM, "_dgpo": DGPO, "_flow_dppo": FLOW_DPPO,
}  # fmt: skip

# FLUX.2 Klein is sampled with true CFG (the pipeline's empty negative prompt). FLUX.2-dev has 32 billion weights, in 4 bits
# on one GPU; its guidance is embedded.
KLEIN = {"sample.num_steps": 8, "sample.guidance_scale": 4.0, "test.num_steps": 28}
KLEIN_4B = KLEIN | {"pretrained.model": "black-forest-labs/FLUX.2-klein-base-4B"}
KLEIN_9B = KLEIN | {"pretrained.model": "black-forest-labs/FLUX.2-klein-base-9B"}
FLUX2 = FOR_24GB | {
    "pretrained.model": "black-forest-labs/FLUX.2-dev", "sample.guidance_scale": 4.0, "test.num_steps": 28,
}  # fmt: skip
# Stable Diffusion 3.5: 256 text tokens are its pipeline's default, and padding tokens are attended to.
SD3 = {
    "pretrained.model": "stabilityai/stable-diffusion-3.5-medium", "max_sequence_length": 256, "test.num_steps": 40,
}  # fmt: skip
SD3_CFG = SD3 | {"sample.guidance_scale": 4.5, "sample.negative_prompt": ""}

# The toy world of ../quickstart, on a CPU: train at 64 px, evaluate at 128 px.
TOY = {
    "item_size": "aspect", "save_dir": "../quickstart/out/runs", "mixed_precision": "no", "eval_freq": 20,
    "num_epochs": 200, "max_train_minutes": 5.0,  # the minutes end it first
    "num_checkpoint_limit": 2, "sample.num_steps": 6, "sample.batch_size": 64, "sample.unique_sample_num_per_epoch": 8,
    "sample.noise_steps": (1,), "sample.same_latent": True,  # images of a group differ only by the noise that is trained on
    "train.resolution": 64, "train.batch_size": 64, "train.learning_rate": 2e-3, "train.adam_beta2": 0.99,
    "train.gradient_step_per_epoch": 1, "train.ema_update_interval": 1, "train.lora_rank": 8, "train.lora_alpha": 16,
    "test.resolution": 128, "test.batch_size": 32, "test.num_steps": 10, "test.num_images": 128,
}  # fmt: skip
# Trained on the oracle, because the toy judge cannot judge edits; weight 0: monitored. Short runs of ppo gained little.
TOY_EDITING = TOY | {
    "dataset": "../quickstart/out/world/edits", "prompt_fn": "geneval_image", "train.reward_fn_kwargs": {},
    "train.reward_fn": {f"paco_toy.edits:oracle_{name}": float(name == "edit") for name in ("edit", "followed", "kept")},
    "train.loss_type": "nft", "train.timesteps": (1, 3),
    "train.adv_clip_max": 1.0,  # an advantage of one standard deviation counts fully
    "sample.noise_level": 0.0, "sample.same_latent": False, "sample.num_images_per_prompt": 8,
    "sample.unique_sample_num_per_epoch": 16, "test.resolution": 64,  # the toy bases are better at it than at 128 px
}  # fmt: skip
_ORACLES = ("consistency", "alignment", "distinct")

# A name with a suffix needs an entry only where more changes than the suffix says.
RECIPES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "kontext_editing": ("editing", {
        "pretrained.model": "black-forest-labs/FLUX.1-Kontext-dev", "sample.num_steps": 8, "sample.noise_level": 0.9,
        "sample.guidance_scale": 2.5,
    }),
    "qwen_editing": ("editing", {
        "pretrained.model": "Qwen/Qwen-Image-Edit", "sample.noise_steps": (1, 2, 3, 4), "sample.noise_level": 1.0,
        "sample.guidance_scale": 4.0, "sample.negative_prompt": " ",  # true CFG
    }),
    # Human preference, on lines of text as ocr. python dataset/fetch.py pickscore
    "pickscore": ("ocr", {
        "dataset": "dataset/public-pickscore", "sample.noise_level": 0.7, "train.reward_fn": {"pickscore": 1.0},
    }),
    "t2is_24gb": ("t2is", FOR_24GB | CLIP_ON_CPU),
    "t2is_48gb": ("t2is", FOR_48GB | CLIP_IN_HALF),
    "t2is_qwen": ("t2is", {
        "pretrained.model": "Qwen/Qwen-Image-2512", "sample.noise_level": 1.0, "sample.guidance_scale": 4.0,
        "sample.negative_prompt": " ",
    }),
    "t2is_qwen_48gb": ("t2is_qwen", FOR_24GB),
    "qwen_editing_48gb": ("qwen_editing", FOR_24GB),  # 20 billion weights, so in 4 bits already
    "qwen_editing_80gb": ("qwen_editing", FOR_80GB | {"enable_gradient_checkpointing": True}),  # 38 GiB are weights
    # As in the published training: half the forwards.
    "qwen_editing_no_cfg": ("qwen_editing", {"sample.guidance_scale": 1.0, "sample.negative_prompt": None}),
    # Takes several reference images (``images`` in the rows of the set); without checkpointing, one fills 80 GB.
    "qwen_editing_2511": ("qwen_editing", {
        "pretrained.model": "Qwen/Qwen-Image-Edit-2511", "enable_gradient_checkpointing": True,
    }),
    "qwen_editing_2511_48gb": ("qwen_editing_2511", FOR_24GB),
    "klein_t2is": ("t2is", KLEIN_4B),
    "klein_t2is_9b": ("t2is", KLEIN_9B),
    "klein_editing": ("editing", KLEIN_4B),
    "klein_editing_9b": ("editing", KLEIN_9B),
    "flux2_t2is": ("t2is", FLUX2),
    "flux2_editing": ("editing", FLUX2),
    "ocr_128": ("ocr", {"train.resolution": 128}),
    "ocr_512": ("ocr", {"train.resolution": 512}),
    # Without CFG: what most papers on objectives train.
    "sd3_ocr": ("ocr_512", SD3 | {"sample.noise_level": 0.7, "sample.guidance_scale": 1.0}),
    "sd3_t2is": ("t2is", SD3_CFG),
    "sd3_t2is_24gb": ("sd3_t2is", FOR_48GB | CLIP_ON_CPU),  # 2.5 billion weights
    "sd3_large_t2is": ("t2is", SD3_CFG | {"pretrained.model": "stabilityai/stable-diffusion-3.5-large"}),
    "sd3_large_t2is_24gb": ("sd3_large_t2is", FOR_24GB | CLIP_ON_CPU),
    "z_image_t2is": ("t2is", {
        "pretrained.model": "Tongyi-MAI/Z-Image", "sample.guidance_scale": 4.0, "sample.negative_prompt": "",
        "test.num_steps": 28,
    }),
    "z_image_t2is_24gb": ("z_image_t2is", FOR_24GB | CLIP_ON_CPU),
    # Distilled: few steps, no guidance (scale 0), and a KL term, or training soon undoes the distillation.
    "z_image_turbo_t2is": ("t2is", {
        "pretrained.model": "Tongyi-MAI/Z-Image-Turbo", "sample.num_steps": 6, "sample.guidance_scale": 0.0,
        "test.num_steps": 8, "train.beta": 1e-3,
    }),
    # Half of the prompts leave part of the character open. Panels should agree and images of a prompt differ, which
    # needs a LoRA of high rank on all linear layers (docs/rewards.md).
    "toy_t2is": ("", TOY | {
        "dataset": "../quickstart/out/world/prompts", "pretrained.model": "../quickstart/models/flux",
        "max_sequence_length": 32,  # the toy model was built with it; the longest prompt has 31 tokens
        "train.reward_fn": {
            "consistency_score": 1.0, "between_images": 8.0, "paco_toy.oracle:oracle_consistency": 0.0,  # 0: monitored
        },
        "train.reward_fn_kwargs": {name: {"model": "PaCo-Reward-Toy"} for name in ("consistency_score", "between_images")},
        "train.aggregate_fn": "product_aggregate_fn", "train.lora_rank": 128, "train.lora_alpha": 256,
        "train.lora_targets": ".*", "train.learning_rate": 1e-3, "sample.latents_per_prompt": 4,
        "test.reward_fn": {"consistency_score": 1.0} | {f"paco_toy.oracle:oracle_{name}": 1.0 for name in _ORACLES},
    }),
    # Panels agree and choices stay open, where ppo learns little of either. Epochs end it, not the machine's speed. The
    # slow copy would be nearly what is trained, and cost a forward for each σ.
    "toy_t2is_awm": ("toy_t2is", {
        "eval_freq": 10, "num_epochs": 20, "sample.noise_level": 0.0, "sample.same_latent": False,
        "sample.latents_per_prompt": 1, "train.loss_type": "awm", "train.num_sigmas": 3, "train.beta": 0.02,
        "train.awm_slow_beta": 0.0,
    }),
    # The toy models were built with 8 text tokens; an instruction has 5.
    "toy_kontext": ("kontext_editing", TOY_EDITING | {
        "pretrained.model": "../quickstart/models/flux_kontext", "max_sequence_length": 8,
    }),
    # With true CFG, the toy base follows instructions less (oracle edit 0.65 at scale 1, 0.39 at 2).
    # For small weights of your own: name them with pretrained.model.
    "toy_qwen_edit": ("qwen_editing_no_cfg", TOY_EDITING | {"pretrained.image_positions": "stock"}),
}  # fmt: skip
CONFIGS = ("t2is", "ocr", *RECIPES)


def get_config(name: str = "") -> ConfigDict:
    """The configuration called ``name``."""
    if name in RECIPES:
        start, changes = RECIPES[name]
        return _changed(get_config(start) if start else config_dict(), changes)
    function = globals().get(name)
    if (
        getattr(function, "__module__", "") == __name__
        and not name.startswith("_")
        and function is not get_config
    ):
        return function()
    for suffix, changes in SUFFIXES.items():
        if name.endswith(suffix):
            return _changed(get_config(name.removesuffix(suffix)), changes)
    raise KeyError(
        f"unknown configuration {name!r}.{did_you_mean(name, CONFIGS)} Known: {', '.join(sorted(CONFIGS))}, each also with "
        f"{', '.join(SUFFIXES)}"
    )


def _changed(config: ConfigDict, changes: Mapping[str, Any]) -> ConfigDict:
    for name, value in changes.items():
        *groups, option = name.split(".")
        reduce(getattr, groups, config)[option] = value(config) if callable(value) else value
    return config
