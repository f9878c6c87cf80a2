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
    product_aggregate_fn,
    weighted_advantage_sum_aggregate_fn,
)
from paco_grpo.suggest import did_you_mean

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


def t2is_qwen() -> ConfigDict:
    """t2is with Qwen-Image-2512, sampled with true CFG."""
    config = t2is()
    config.pretrained.model = "Qwen/Qwen-Image-2512"
    config.sample.noise_level = 1.0
    config.sample.guidance_scale = 4.0
    config.sample.negative_prompt = " "
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


def qwen_editing_2511() -> ConfigDict:
    """qwen_editing with Qwen-Image-Edit-2511, which takes several reference images (``images`` in the rows of the set)."""
    config = qwen_editing()
    config.pretrained.model = "Qwen/Qwen-Image-Edit-2511"
    config.enable_gradient_checkpointing = True  # without it, one reference image fills 80 GB
    return config


def qwen_editing_no_cfg() -> ConfigDict:
    """qwen_editing without true CFG, as in the published training: half the forwards."""
    config = qwen_editing()
    config.sample.guidance_scale = 1.0
    config.sample.negative_prompt = None
    return config


def _klein(config: ConfigDict, size: str) -> ConfigDict:
    """``config`` with the base model of FLUX.2 Klein, sampled with true CFG (the pipeline's empty negative prompt)."""
    config.pretrained.model = f"black-forest-labs/FLUX.2-klein-base-{size}"
    config.sample.num_steps = 8
    config.sample.guidance_scale = 4.0
    config.test.num_steps = 28
    return config


def klein_t2is(size: str = "4B") -> ConfigDict:
    """t2is with FLUX.2 Klein."""
    return _klein(t2is(), size)


def klein_editing(size: str = "4B") -> ConfigDict:
    """Image editing with FLUX.2 Klein, from any number of reference images."""
    return _klein(_editing(), size)


def _flux2(config: ConfigDict) -> ConfigDict:
    """``config`` with FLUX.2-dev: 32 billion weights, in 4 bits on one GPU; the guidance is embedded."""
    config = _for_24gb(config)
    config.pretrained.model = "black-forest-labs/FLUX.2-dev"
    config.sample.guidance_scale = 4.0
    config.test.num_steps = 28
    return config


def flux2_t2is() -> ConfigDict:
    """t2is with FLUX.2-dev."""
    return _flux2(t2is())


def flux2_editing() -> ConfigDict:
    """Image editing with FLUX.2-dev, from any number of reference images."""
    return _flux2(_editing())


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


def sd3_t2is(size: str = "medium") -> ConfigDict:
    """t2is with Stable Diffusion 3.5 and true CFG against an empty prompt."""
    config = t2is()
    config.pretrained.model = f"stabilityai/stable-diffusion-3.5-{size}"
    config.sample.guidance_scale = 4.5
    config.sample.negative_prompt = ""
    config.max_sequence_length = 256  # the pipeline's default: padding counts as text
    config.test.num_steps = 40
    return config


def sd3_ocr() -> ConfigDict:
    """Text rendering with Stable Diffusion 3.5 medium at 512 px, sampled and trained without CFG: what most papers on
    objectives train."""
    config = ocr(512)
    config.pretrained.model = "stabilityai/stable-diffusion-3.5-medium"
    config.sample.noise_level = 0.7
    config.sample.guidance_scale = 1.0
    config.max_sequence_length = 256
    config.test.num_steps = 40
    return config


def z_image_t2is() -> ConfigDict:
    """t2is with Z-Image and true CFG against an empty prompt; its scale 0 is no guidance."""
    config = t2is()
    config.pretrained.model = "Tongyi-MAI/Z-Image"
    config.sample.guidance_scale = 4.0
    config.sample.negative_prompt = ""
    config.test.num_steps = 28
    return config


def z_image_turbo_t2is() -> ConfigDict:
    """t2is with the distilled Z-Image-Turbo, which needs few steps and no guidance."""
    config = t2is()
    config.pretrained.model = "Tongyi-MAI/Z-Image-Turbo"
    config.sample.num_steps = 6
    config.sample.guidance_scale = 0.0
    config.train.beta = 1e-3  # or training soon undoes the distillation
    config.test.num_steps = 8
    return config


# --- recipes for the memory of one GPU (memory of each phase: scripts/rehearse.py) ------------------------------------


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


def _for_80gb(config: ConfigDict) -> ConfigDict:
    """``config`` with larger forwards of compiled blocks."""
    config.speed.compile = True
    config.sample.batch_size = 7  # divides an epoch of 42 x 16 images on 1, 2, 4 and 8 GPUs; 8 would raise 42 to 44
    config.train.batch_size = 2
    config.test.batch_size = 4
    return config


def qwen_editing_80gb() -> ConfigDict:
    """qwen_editing on 80 GB: 38 GiB are weights, so activations are recomputed."""
    config = _for_80gb(qwen_editing())
    config.enable_gradient_checkpointing = True
    return config


def _t2is_short_tail() -> ConfigDict:
    """t2is with four second-order steps after the noise step in place of eight: the same gain in the toy world for 0.7 of
    the time (docs/speed-and-memory.md). Evaluation keeps all steps."""
    config = t2is()
    config.sample.tail_steps = 4
    config.sample.tail_order = 2
    return config


def t2is_48gb() -> ConfigDict:
    """t2is on 48 GB; the two CLIP models in half precision leave room for T5."""
    config = _for_48gb(_t2is_short_tail())
    for name in ("subfig_clipT", "pickscore"):
        config.train.reward_fn_kwargs[name] = {"dtype": "float16"}
    return config


def _clip_on_cpu(config: ConfigDict) -> ConfigDict:
    """``config`` of t2is with its two CLIP models on the CPU, while images are sampled."""
    for name in ("subfig_clipT", "pickscore"):
        config.train.reward_fn_kwargs[name] = {"device": "cpu"}
    return config


# --- objectives with the settings of their authors ---------------------------------------------------------------------


def _authors(config: ConfigDict, images: int, prompts: int) -> ConfigDict:
    """Common to all: groups of that size, standard deviation over all images, a LoRA on attention alone."""
    config.sample.num_images_per_prompt = images
    config.sample.unique_sample_num_per_epoch = prompts
    config.sample.global_std = True
    config.train.lora_targets = "attention"
    config.train.lora_rank = 32
    config.train.lora_alpha = 64
    return config


def with_nft(config: ConfigDict) -> ConfigDict:
    """DiffusionNFT (arXiv 2509.16117), its multi-reward settings: all steps but the last, β = 0.1."""
    config = _authors(config, 24, 48)
    config.sample.noise_level = 0.0
    config.train.loss_type = "nft"
    config.train.num_sigmas = config.sample.num_steps - 1
    config.train.sigma_fraction = 0.99
    config.train.sigma_one = True
    config.train.nft_beta = 0.1
    config.train.beta = 1e-4
    config.train.ema_update_interval = 1
    return config


def with_awm(config: ConfigDict) -> ConfigDict:
    """Advantage Weighted Matching (arXiv 2509.25050), with its weight of the KL for text rendering."""
    config = _authors(config, 24, 72)
    config.sample.noise_level = 0.0
    config.train.loss_type = "awm"  # the defaults of its options are the authors'
    config.train.beta = 3e-3
    config.train.ema_decay = 0.99
    config.train.ema_update_interval = 1
    return config


def with_dgpo(config: ConfigDict) -> ConfigDict:
    """DGPO (arXiv 2510.08425), its mode with a frozen reference: σ of the first 70 % of the steps."""
    config = _authors(config, 24, 24)
    config.sample.noise_level = 0.0
    config.train.loss_type = "dgpo"
    config.train.sigma_fraction = 0.7
    config.train.sigma_one = True
    config.train.beta = 1e-3
    config.train.lora_rank = 64
    config.train.lora_alpha = 128
    return config


def with_flow_dppo(config: ConfigDict) -> ConfigDict:
    """Flow-DPPO (arXiv 2606.11025): three noise steps of the first half, two optimizer steps an epoch."""
    config = _authors(config, 16, 48)
    config.sample.noise_steps = tuple(range(config.sample.num_steps // 2))
    config.sample.num_noise_steps = 3
    config.train.loss_type = "flow_dppo"
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
    """t2is in the toy world, with a judge over HTTP; half of the prompts leave part of the character open.

    The reward is high where the panels of an image agree and the images of a prompt differ.
    """
    config = _toy(base.get_config())
    config.dataset = "../quickstart/out/world/prompts"
    config.pretrained.model = "../quickstart/models/flux"
    config.max_sequence_length = 32  # the toy model was built with it; the longest prompt has 31 tokens
    config.train.reward_fn = {
        "consistency_score": 1.0,
        "between_images": 8.0,
        "paco_toy.oracle:oracle_consistency": 0.0,  # weight 0: monitored at 64 px, not trained on
    }
    config.train.aggregate_fn = "product_aggregate_fn"
    config.train.reward_fn_kwargs = {name: {"model": "PaCo-Reward-Toy"} for name in ("consistency_score", "between_images")}
    # Panels that agree need a LoRA of high rank (the width is 128) on all linear layers: docs/rewards.md.
    config.train.lora_rank = 128
    config.train.lora_alpha = 256
    config.train.lora_targets = ".*"
    config.train.learning_rate = 1e-3
    config.sample.latents_per_prompt = 4
    oracles = ("consistency", "alignment", "view", "valid", "distinct")
    config.test.reward_fn = {"consistency_score": 1.0} | {f"paco_toy.oracle:oracle_{name}": 1.0 for name in oracles}
    return config


def toy_t2is_awm() -> ConfigDict:
    """toy_t2is by AWM: panels agree and choices stay open, where ppo learns little of either (docs/rewards.md)."""
    config = toy_t2is()
    config.eval_freq = 10
    config.num_epochs = 20  # so that results do not depend on the machine's speed; max_train_minutes ends slower ones
    config.sample.noise_level = 0.0
    config.sample.same_latent = False
    config.sample.latents_per_prompt = 1
    config.train.loss_type = "awm"
    config.train.num_sigmas = 3
    config.train.beta = 0.02
    # With one optimizer step an epoch the slow copy is nearly what is trained (squared distance below 2e-6, that of the KL
    # term 0.03), and its term would cost a forward for each σ.
    config.train.awm_slow_beta = 0.0
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
    "qwen_editing_2511": qwen_editing_2511,
    "t2is_qwen": t2is_qwen,
    "ocr": ocr,
    "ocr_128": lambda: ocr(128),
    "ocr_512": lambda: ocr(512),
    "pickscore": pickscore,
    "t2is_80gb": lambda: _for_80gb(_t2is_short_tail()),
    "t2is_48gb": t2is_48gb,
    "t2is_24gb": lambda: _clip_on_cpu(_for_24gb(_t2is_short_tail())),
    "kontext_editing_80gb": lambda: _for_80gb(kontext_editing()),
    "kontext_editing_48gb": lambda: _for_48gb(kontext_editing()),
    "kontext_editing_24gb": lambda: _for_24gb(kontext_editing()),
    "qwen_editing_80gb": qwen_editing_80gb,
    "qwen_editing_48gb": lambda: _for_24gb(qwen_editing()),  # 20 billion weights, so in 4 bits already
    "qwen_editing_2511_48gb": lambda: _for_24gb(qwen_editing_2511()),
    "t2is_qwen_48gb": lambda: _for_24gb(t2is_qwen()),
    "sd3_t2is": sd3_t2is,
    "sd3_t2is_24gb": lambda: _clip_on_cpu(_for_48gb(sd3_t2is())),  # 2.5 billion weights
    "sd3_large_t2is": lambda: sd3_t2is("large"),
    "sd3_large_t2is_48gb": lambda: _for_48gb(sd3_t2is("large")),
    "sd3_large_t2is_24gb": lambda: _clip_on_cpu(_for_24gb(sd3_t2is("large"))),
    "z_image_t2is": z_image_t2is,
    "z_image_t2is_48gb": lambda: _for_48gb(z_image_t2is()),
    "z_image_t2is_24gb": lambda: _clip_on_cpu(_for_24gb(z_image_t2is())),
    "z_image_turbo_t2is": z_image_turbo_t2is,
    "sd3_ocr": sd3_ocr,
    "sd3_ocr_nft": lambda: with_nft(sd3_ocr()),
    "sd3_ocr_awm": lambda: with_awm(sd3_ocr()),
    "sd3_ocr_dgpo": lambda: with_dgpo(sd3_ocr()),
    "sd3_ocr_flow_dppo": lambda: with_flow_dppo(sd3_ocr()),
    "t2is_nft": lambda: with_nft(t2is()),
    "t2is_awm": lambda: with_awm(t2is()),
    "t2is_dgpo": lambda: with_dgpo(t2is()),
    "t2is_flow_dppo": lambda: with_flow_dppo(t2is()),
    "klein_t2is": klein_t2is,
    "klein_editing": klein_editing,
    "klein_t2is_9b": lambda: klein_t2is("9B"),
    "klein_editing_9b": lambda: klein_editing("9B"),
    "flux2_t2is": flux2_t2is,
    "flux2_editing": flux2_editing,
    "toy_t2is": toy_t2is,
    "toy_t2is_awm": toy_t2is_awm,
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
