"""Named configurations: ``--config config/grpo.py:NAME`` (docs/method.md §7; arXiv 2512.04784).

Each function below changes ``base.get_config()`` and is found by its name in ``CONFIGS``.
"""

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np  # noqa: F401 - for aggregations of your own
from ml_collections import ConfigDict

from paco_grpo.advantages.aggregation import (  # noqa: F401 - for config.train.aggregate_fn
    geometric_mean_aggregate_fn,
    harmonic_mean_aggregate_fn,
    log_tame_aggregate_fn,
    weighted_advantage_sum_aggregate_fn,
)
from paco_grpo.options import did_you_mean

# This file is loaded by its path, so ``config`` is not a package that it could import from.
base = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("base.py"))))


def t2is() -> ConfigDict:
    """Text to image set with FLUX.1-dev: train at 512 px, evaluate at 1024 px."""
    config = base.get_config()
    config.dataset = "dataset/T2IS"
    config.item_size = "aspect"  # one prompt set serves every resolution
    config.sample.global_std = True
    config.train.reward_fn = {"consistency_score": 0.2, "subfig_clipT": 1.0, "pickscore": 1.0}
    # The judge on this machine's port 8000; elsewhere add "port", "host" or "base_url".
    config.train.reward_fn_kwargs = {"consistency_score": {"model": "PaCo-Reward-7B"}}
    return config


def _editing() -> ConfigDict:
    """Common to the two editors: train at 384 px, evaluate at 512 px, one reward."""
    config = base.get_config()
    config.dataset = "dataset/public-sharegpt-4o-image"  # python dataset/fetch.py sharegpt-4o-image
    config.prompt_fn = "arrow_editing"
    config.item_size = "aspect"
    config.train.resolution = 384
    config.test.resolution = 512
    config.train.reward_fn = {"consistency_for_editing": 1.0}
    config.train.reward_fn_kwargs = {"consistency_for_editing": {"model": "PaCo-Reward-7B"}}
    return config


def kontext_editing() -> ConfigDict:
    """Image editing with FLUX.1-Kontext-dev."""
    config = _editing()
    config.pretrained.model = "black-forest-labs/FLUX.1-Kontext-dev"
    config.sample.num_steps = 8
    config.sample.noise_level = 0.9
    config.sample.guidance_scale = 2.5
    return config


def qwen_editing() -> ConfigDict:
    """Image editing with Qwen-Image-Edit, sampled with true CFG."""
    config = _editing()
    config.pretrained.model = "Qwen/Qwen-Image-Edit"
    config.sample.noise_steps = (1, 2, 3, 4)
    config.sample.noise_level = 1.0
    config.sample.guidance_scale = 4.0
    config.sample.negative_prompt = " "
    return config


def qwen_editing_no_cfg() -> ConfigDict:
    """qwen_editing without true CFG, as in the published training: half the forwards."""
    config = qwen_editing()
    config.sample.guidance_scale = 1.0
    config.sample.negative_prompt = None
    return config


def _one_image(resolution: int = 256) -> ConfigDict:
    """One image for each prompt with FLUX.1-dev, evaluated at 512 px; prompts are lines of text."""
    config = base.get_config()
    config.prompt_fn = "general_ocr"
    config.train.resolution = resolution
    config.test.resolution = 512
    return config


def ocr(resolution: int = 256) -> ConfigDict:
    """Text rendering: the published study of training resolutions (128, 256 and 512 px, all evaluated at 512 px)."""
    config = _one_image(resolution)
    config.dataset = "dataset/public-ocr"  # python dataset/fetch.py ocr
    config.sample.noise_level = 0.8
    config.train.reward_fn = {"ocr": 1.0}
    return config


def pickscore() -> ConfigDict:
    """Human preference."""
    config = _one_image()
    config.dataset = "dataset/public-pickscore"  # python dataset/fetch.py pickscore
    config.train.reward_fn = {"pickscore": 1.0}
    return config


# --- recipes for the memory of one GPU (memory of each phase: benchmarks/memory.py) -----------------------------------


def _for_48gb(config: ConfigDict) -> ConfigDict:
    """``config`` with activations recomputed in the backward pass and the VAE in main memory between uses."""
    config.enable_gradient_checkpointing = True
    config.speed.offload_vae = True
    return config


def _for_24gb(config: ConfigDict) -> ConfigDict:
    """As for 48 GB, with the frozen transformer in 4 bits (QLoRA, arXiv 2305.14314)."""
    config = _for_48gb(config)
    config.pretrained.quantize = "nf4"
    return config


def t2is_80gb() -> ConfigDict:
    """t2is on 80 GB: two images per forward."""
    config = t2is()
    config.sample.batch_size = 2
    config.train.batch_size = 2
    config.test.batch_size = 2
    return config


def t2is_24gb() -> ConfigDict:
    """t2is on 24 GB; the two CLIP models run on the CPU while images are sampled."""
    config = _for_24gb(t2is())
    for name in ("subfig_clipT", "pickscore"):
        config.train.reward_fn_kwargs[name] = {"device": "cpu"}
    return config


def _toy(config: ConfigDict) -> ConfigDict:
    """``config`` for the toy world of ../quickstart, on a CPU: train at 64 px, evaluate at 128 px."""
    config.item_size = "aspect"
    config.save_dir = "../quickstart/out/runs"
    config.mixed_precision = "no"
    config.num_epochs = 200  # more than the minutes below allow
    config.max_train_minutes = 5.0
    config.eval_freq = 20
    config.num_checkpoint_limit = 2

    config.sample.num_steps = 6  # fewer than in the test, to save time
    config.sample.noise_steps = (1,)
    config.sample.batch_size = 64
    config.sample.unique_sample_num_per_epoch = 8
    config.sample.same_latent = True  # images of a group differ only by the noise that is trained on
    config.train.resolution = 64
    config.train.batch_size = 64
    config.train.learning_rate = 2e-3
    config.train.adam_beta2 = 0.99
    config.train.gradient_step_per_epoch = 1
    config.train.ema_update_interval = 1
    config.train.lora_rank = 8
    config.train.lora_alpha = 16

    config.test.resolution = 128
    config.test.batch_size = 32
    config.test.num_steps = 10
    config.test.num_images = 128
    return config


def toy_t2is() -> ConfigDict:
    """t2is in the toy world, with a judge over HTTP."""
    config = _toy(base.get_config())
    config.dataset = "../quickstart/out/world/prompts"
    config.pretrained.model = "../quickstart/models/flux"
    config.max_sequence_length = 32  # the toy model was built with it; the longest prompt has 31 tokens
    config.train.reward_fn = {
        "consistency_score": 1.0,
        "paco_toy.oracle:oracle_consistency": 0.0,  # weight 0: monitored at 64 px, not trained on
    }
    config.train.reward_fn_kwargs = {"consistency_score": {"model": "PaCo-Reward-Toy"}}
    oracles = ("consistency", "alignment", "view", "valid", "distinct")
    config.test.reward_fn = {"consistency_score": 1.0} | {f"paco_toy.oracle:oracle_{name}": 1.0 for name in oracles}
    return config


def _toy_editing(config: ConfigDict) -> ConfigDict:
    """``config`` for the editing task of the toy world; trained on the oracle, because the toy judge cannot judge edits."""
    config = _toy(config)
    config.dataset = "../quickstart/out/world/edits"
    config.prompt_fn = "geneval_image"
    config.train.reward_fn = {
        "paco_toy.edit_oracle:oracle_edit": 1.0,
        "paco_toy.edit_oracle:oracle_followed": 0.0,  # weight 0: monitored, not trained on
        "paco_toy.edit_oracle:oracle_kept": 0.0,
    }
    config.train.reward_fn_kwargs = {}
    # An edit is followed or not. nft learns from whole images, sampled without noise; short runs of ppo gained little.
    config.train.loss_type = "nft"
    config.train.timesteps = (1, 3)
    config.train.adv_clip_max = 1.0  # an advantage of one standard deviation counts fully
    config.sample.noise_level = 0.0
    config.sample.same_latent = False
    config.sample.num_images_per_prompt = 8
    config.sample.unique_sample_num_per_epoch = 16
    config.test.resolution = 64  # the toy bases are better at it than at 128 px
    return config


def toy_kontext() -> ConfigDict:
    """kontext_editing with toy weights, on a CPU."""
    config = _toy_editing(kontext_editing())
    config.pretrained.model = "../quickstart/models/flux_kontext"
    config.max_sequence_length = 8  # the toy model was built with it; an instruction has 5 tokens
    return config


def toy_qwen_edit() -> ConfigDict:
    """qwen_editing with toy weights, on a CPU; its base was trained at 64 px only."""
    # With true CFG, the toy base follows instructions less (oracle edit 0.65 at scale 1, 0.39 at 2), and an epoch would take
    # twice as long.
    config = _toy_editing(qwen_editing_no_cfg())
    config.pretrained.model = "../quickstart/models/qwen_image_edit"
    config.pretrained.image_positions = "stock"  # as its base was trained
    return config


CONFIGS = {
    "t2is": t2is,
    "kontext_editing": kontext_editing,
    "qwen_editing": qwen_editing,
    "qwen_editing_no_cfg": qwen_editing_no_cfg,
    "ocr": ocr,
    "ocr_128": lambda: ocr(128),
    "ocr_512": lambda: ocr(512),
    "pickscore": pickscore,
    "t2is_80gb": t2is_80gb,
    "t2is_48gb": lambda: _for_48gb(t2is()),
    "t2is_24gb": t2is_24gb,
    "kontext_editing_48gb": lambda: _for_48gb(kontext_editing()),
    "kontext_editing_24gb": lambda: _for_24gb(kontext_editing()),
    "qwen_editing_48gb": lambda: _for_24gb(qwen_editing()),  # 20 billion weights, so in 4 bits already
    "toy_t2is": toy_t2is,
    "toy_kontext": toy_kontext,
    "toy_qwen_edit": toy_qwen_edit,
}


def get_config(name: str = "") -> ConfigDict:
    """The configuration called ``name``.

    Raises:
        KeyError: The name is unknown; the message lists the known ones.
    """
    if name not in CONFIGS:
        raise KeyError(
            f"unknown configuration {name!r}.{did_you_mean(name, CONFIGS)} Known: {', '.join(sorted(CONFIGS))}"
        )
    return CONFIGS[name]()
