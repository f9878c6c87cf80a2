"""Named configurations: ``--config config/grpo.py:NAME`` (docs/method.md §7; arXiv 2512.04784).

NAME is a function without arguments in one of the files below, and may be followed by any of
``SUFFIXES`` in any order: ``klein_t2is_nft``, ``t2is_80gb_fast``. Where there is a function for a
name with a suffix, it is used instead of the suffix: ``t2is_24gb``. To make a configuration of your
own, copy a function and change it, here or in a file of your own. All options with their defaults
and meanings: docs/configuration.md.

    grpo_t2is.py     t2is (FLUX.1-dev), t2is_variety, the suffixes _24gb, _48gb, _80gb and _fast
    grpo_models.py   other generators: t2is_qwen, klein_t2is, sd3_t2is, …; ocr and pickscore
    grpo_editing.py  kontext_editing, qwen_editing, …
    grpo_toy.py      toy_t2is, toy_kontext, …, for ../quickstart

Every configuration evaluates at least one reward that it does not train, its guard: a trained
reward that rises while it falls is being exploited (docs/recovery.md).
"""

import sys
from pathlib import Path

import numpy as np  # noqa: F401 - for aggregations of your own
from ml_collections import ConfigDict

from paco_grpo.advantages.aggregation import (  # noqa: F401 - for config.train.aggregate_fn
    geometric_mean_aggregate_fn,
    harmonic_mean_aggregate_fn,
    log_tame_aggregate_fn,
    product_aggregate_fn,
    weighted_advantage_sum_aggregate_fn,
)

sys.path.append(str(Path(__file__).parent))
from grpo_editing import *
from grpo_models import *
from grpo_t2is import *
from grpo_toy import *

# --- suffixes: the objectives, with the settings of their papers ---------------------------------


def paper_settings(config: ConfigDict, images: int, prompts: int, rank: int = 32) -> None:
    """What papers on objectives share: groups, global deviation, a LoRA on attention."""
    config.sample.num_images_per_prompt = images
    config.sample.unique_sample_num_per_epoch = prompts
    config.sample.global_std = True
    config.train.lora_targets = "attention"
    config.train.lora_rank = rank
    config.train.lora_alpha = 2 * rank


def nft(config: ConfigDict) -> None:
    """DiffusionNFT (arXiv 2509.16117), multi-reward settings: all steps but the last, β = 0.1."""
    paper_settings(config, images=24, prompts=48)
    config.sample.noise_level = 0.0
    config.train.loss_type = "nft"
    config.train.num_sigmas = config.sample.num_steps - 1
    config.train.sigma_fraction = 0.99
    config.train.sigma_one = True
    config.train.nft_beta = 0.1
    config.train.beta = 1e-4
    config.train.ema_update_interval = 1


def awm(config: ConfigDict) -> None:
    """Advantage Weighted Matching (arXiv 2509.25050), with its KL weight for text rendering."""
    paper_settings(config, images=24, prompts=72)
    config.sample.noise_level = 0.0
    config.train.loss_type = "awm"
    config.train.beta = 3e-3
    config.train.ema_decay = 0.99
    config.train.ema_update_interval = 1


def dgpo(config: ConfigDict) -> None:
    """DGPO (arXiv 2510.08425) with a frozen reference: σ of the first 70 % of the steps."""
    paper_settings(config, images=24, prompts=24, rank=64)
    config.sample.noise_level = 0.0
    config.train.loss_type = "dgpo"
    config.train.sigma_fraction = 0.7
    config.train.sigma_one = True
    config.train.beta = 1e-3


def flow_dppo(config: ConfigDict) -> None:
    """Flow-DPPO (arXiv 2606.11025): three noise steps of the first half of the schedule."""
    paper_settings(config, images=16, prompts=48)
    config.train.loss_type = "flow_dppo"
    config.sample.noise_level = config.sample.noise_level or 0.7  # t2is_variety has none
    config.sample.num_noise_steps = 3
    config.sample.noise_steps = tuple(range(config.sample.num_steps // 2))


SUFFIXES = {
    "_24gb": for_24gb,
    "_48gb": for_48gb,
    "_80gb": for_80gb,
    "_fast": fast,
    "_nft": nft,
    "_awm": awm,
    "_dgpo": dgpo,
    "_flow_dppo": flow_dppo,
}
