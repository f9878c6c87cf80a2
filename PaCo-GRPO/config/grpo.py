"""Named configurations: ``--config config/grpo.py:NAME`` (docs/method.md §7; arXiv 2512.04784).

NAME is a function of this file that takes no arguments, and may be followed by any of ``SUFFIXES``
in any order: ``klein_t2is_nft``, ``t2is_80gb_fast``. Where this file has a function for a name with
a suffix, it is used instead of the suffix: ``toy_t2is_nft``. To make a configuration of your own,
copy a function and change it, here or in a file of your own; the suffixes work for it, too. All
options with their defaults and meanings: docs/configuration.md.

Every configuration evaluates at least one reward that it does not train, its guard: a trained
reward that rises while it falls is being exploited (docs/recovery.md).
"""

from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

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

CLIP_REWARDS = ("clipscore", "pickscore", "reference_clipI", "subfig_clipI", "subfig_clipT")
ON_CPU = {"device": "cpu"}

# --- text to image set ---------------------------------------------------------------------------


def t2is() -> ConfigDict:
    """FLUX.1-dev: train at 512 px, evaluate at 1024 px.

    Objective and numbers are the defaults: ``ppo``, 10 steps with noise at step 1, 42 prompts of 16
    images, two optimizer steps an epoch.
    """
    config = config_dict()
    config.dataset = "dataset/T2IS"
    config.item_size = "aspect"  # one prompt set serves every resolution
    config.sample.global_std = True
    config.train.reward_fn = {"consistency_score": 0.2, "subfig_clipT": 1.0, "pickscore": 1.0}
    # The judge on this machine's port 8000; elsewhere add "port", "host" or "base_url".
    config.train.reward_fn_kwargs = {"consistency_score": {"model": "PaCo-Reward-7B"}}
    config.test.reward_fn = config.train.reward_fn
    guard(config, "subfig_clipI", "clipscore")
    return config


def t2is_variety() -> ConfigDict:
    """Consistency × variety: panels agree, and images of a prompt that leaves a choice differ.

    Rewards, objective, advantages and optimizer are the quickstart's. Number of images, steps,
    learning rate and LoRA are those of ``t2is``: the quickstart's LoRA, of rank 128 on all layers,
    fits only on 80 GB (docs/rewards.md).
    """
    config = t2is()
    config.sample.global_std = False
    config.train.adam_beta2 = 0.99
    # python dataset/fetch.py t2is --source dataset/T2IS --open_twins --output dataset/T2IS-twins
    config.dataset = "dataset/T2IS-twins"
    judge = {"model": "PaCo-Reward-7B"}
    config.train.reward_fn = {"consistency_score": 1.0, "between_images": 8.0}
    config.train.reward_fn_kwargs = {"consistency_score": judge, "between_images": judge}
    config.train.aggregate_fn = "product_aggregate_fn"
    config.train.loss_type = "nft"
    config.train.sigma_one = True
    without_noise(config)
    # An evaluation has one image of each prompt, so there is nothing that between_images compares.
    config.test.reward_fn = {"consistency_score": 1.0}
    guard(config, "subfig_clipT", "pickscore")
    return config


def people_t2is() -> ConfigDict:
    """FLUX.1-dev, trained on your votes (docs/rewards.md) with the settings of the toy world."""
    config = t2is()
    people(config)
    config.test.num_images = 32  # more would keep you waiting
    config.test.reward_fn = {"subfig_clipI": 1.0, "subfig_clipT": 1.0, "pickscore": 1.0}
    return config


def t2is_one_gpu() -> ConfigDict:
    """``t2is_variety`` on one card of 24 GB, beside a judge in 4 bits (docs/one-gpu.md).

    The quickstart's numbers of prompts, images, epochs and σ, FLUX.2 Klein with 4 billion weights,
    and evaluations of 32 images.
    """
    config = t2is_variety()
    klein(config)
    config.num_epochs = 16
    config.eval_freq = 8
    config.save_freq = 4
    config.sample.unique_sample_num_per_epoch = 8
    config.train.learning_rate = 1e-3  # 16 steps of 3e-4 hardly teach the toy model
    config.test.resolution = 512
    config.test.num_images = 32
    config.speed.offload_text = True  # the judge takes the memory that would let them stay
    less_memory(config, 24, trained_clip=ON_CPU)
    return config


def t2is_qwen() -> ConfigDict:
    """Qwen-Image-2512, with true CFG."""
    config = t2is()
    config.pretrained.model = "Qwen/Qwen-Image-2512"
    config.sample.noise_level = 1.0
    config.sample.guidance_scale = 4.0
    config.sample.negative_prompt = " "
    return config


def klein_t2is() -> ConfigDict:
    """FLUX.2 Klein with 4 billion weights."""
    config = t2is()
    klein(config)
    return config


def klein_t2is_9b() -> ConfigDict:
    """FLUX.2 Klein with 9 billion weights."""
    config = klein_t2is()
    config.pretrained.model = "black-forest-labs/FLUX.2-klein-base-9B"
    return config


def flux2_t2is() -> ConfigDict:
    """FLUX.2-dev, in 4 bits."""
    config = t2is()
    flux2(config)
    return config


def sd3_t2is() -> ConfigDict:
    """Stable Diffusion 3.5 medium, with true CFG."""
    config = t2is()
    sd3(config)
    config.sample.guidance_scale = 4.5
    config.sample.negative_prompt = ""
    return config


def sd3_large_t2is() -> ConfigDict:
    """Stable Diffusion 3.5 large, with true CFG."""
    config = sd3_t2is()
    config.pretrained.model = "stabilityai/stable-diffusion-3.5-large"
    return config


def z_image_t2is() -> ConfigDict:
    """Z-Image, with true CFG."""
    config = t2is()
    config.pretrained.model = "Tongyi-MAI/Z-Image"
    config.sample.guidance_scale = 4.0
    config.sample.negative_prompt = ""
    config.test.num_steps = 28
    return config


def z_image_turbo_t2is() -> ConfigDict:
    """Z-Image-Turbo, which is distilled: few steps and no guidance."""
    config = t2is()
    config.pretrained.model = "Tongyi-MAI/Z-Image-Turbo"
    config.sample.num_steps = 6
    config.sample.guidance_scale = 0.0
    config.test.num_steps = 8
    config.train.beta = 1e-3  # without a KL term, training soon undoes the distillation
    return config


def krea_t2is() -> ConfigDict:
    """Krea 2 Raw, with true CFG; its adapter is meant for Turbo (docs/real-weights.md)."""
    config = t2is()
    config.pretrained.model = "krea/Krea-2-Raw"
    config.sample.guidance_scale = 4.5
    config.sample.negative_prompt = ""
    config.test.num_steps = 28
    return config


def qwen21_t2is() -> ConfigDict:
    """Qwen-Image-2.1, which is meant to be used without guidance."""
    config = t2is()
    qwen21(config)
    return config


def longcat_t2is() -> ConfigDict:
    """LongCat-Image, with true CFG."""
    config = t2is()
    longcat(config)
    config.pretrained.model = "meituan-longcat/LongCat-Image"
    return config


def any_t2is() -> ConfigDict:
    """Any pipeline of diffusers from text to image: --config.pretrained.model=NAME."""
    config = t2is()
    any_pipeline(config)
    return config


# --- editing -------------------------------------------------------------------------------------


def editing() -> ConfigDict:
    """What all editors share: train at 384 px, evaluate at 512 px, one reward."""
    config = config_dict()
    config.dataset = "dataset/public-sharegpt-4o-image"  # python dataset/fetch.py sharegpt-4o-image
    config.prompt_fn = "arrow_editing"
    config.item_size = "aspect"
    config.train.resolution = 384
    config.test.resolution = 512
    config.test.num_images = 256  # the whole test split would take longer than training
    config.train.reward_fn = {"consistency_for_editing": 1.0}
    config.train.reward_fn_kwargs = {"consistency_for_editing": {"model": "PaCo-Reward-7B"}}
    config.test.reward_fn = config.train.reward_fn
    guard(config, "reference_clipI", "clipscore")
    return config


def kontext_editing() -> ConfigDict:
    """FLUX.1-Kontext-dev."""
    config = editing()
    config.pretrained.model = "black-forest-labs/FLUX.1-Kontext-dev"
    config.sample.num_steps = 8
    config.sample.noise_level = 0.9
    config.sample.guidance_scale = 2.5
    return config


def qwen_editing() -> ConfigDict:
    """Qwen-Image-Edit, with true CFG."""
    config = editing()
    config.pretrained.model = "Qwen/Qwen-Image-Edit"
    config.sample.noise_steps = (1, 2, 3, 4)
    config.sample.noise_level = 1.0
    config.sample.guidance_scale = 4.0
    config.sample.negative_prompt = " "
    return config


def qwen_editing_no_cfg() -> ConfigDict:
    """As in the published training: without true CFG, half the forwards."""
    config = qwen_editing()
    config.sample.guidance_scale = 1.0
    config.sample.negative_prompt = None
    return config


def qwen_editing_2511() -> ConfigDict:
    """Qwen-Image-Edit-2511, which takes several reference images (``images`` of a row)."""
    config = qwen_editing()
    config.pretrained.model = "Qwen/Qwen-Image-Edit-2511"
    config.enable_gradient_checkpointing = True  # without it, one image fills 80 GB
    return config


def klein_editing() -> ConfigDict:
    """FLUX.2 Klein with 4 billion weights."""
    config = editing()
    klein(config)
    return config


def klein_editing_9b() -> ConfigDict:
    """FLUX.2 Klein with 9 billion weights."""
    config = klein_editing()
    config.pretrained.model = "black-forest-labs/FLUX.2-klein-base-9B"
    return config


def flux2_editing() -> ConfigDict:
    """FLUX.2-dev, in 4 bits."""
    config = editing()
    flux2(config)
    return config


def qwen21_editing() -> ConfigDict:
    """Qwen-Image-2.1, which takes several reference images (``images`` of a row)."""
    config = editing()
    qwen21(config)
    return config


def longcat_editing() -> ConfigDict:
    """LongCat-Image-Edit, with true CFG."""
    config = editing()
    longcat(config)
    config.pretrained.model = "meituan-longcat/LongCat-Image-Edit"
    return config


def any_editing() -> ConfigDict:
    """Any pipeline of diffusers that edits an image: --config.pretrained.model=NAME."""
    config = editing()
    any_pipeline(config)
    config.pretrained.model = "black-forest-labs/FLUX.1-Kontext-dev"
    return config


# --- one image for a prompt ----------------------------------------------------------------------


def ocr() -> ConfigDict:
    """Text rendering with FLUX.1-dev: train at 256 px, evaluate at 512 px."""
    config = config_dict()
    config.dataset = "dataset/public-ocr"  # python dataset/fetch.py ocr
    config.prompt_fn = "general_ocr"  # one prompt a line
    config.train.resolution = 256
    config.test.resolution = 512
    config.test.num_images = 256
    config.sample.noise_level = 0.8
    config.sample.global_std = True
    config.train.reward_fn = {"ocr": 1.0}
    config.test.reward_fn = {"ocr": 1.0}
    guard(config, "pickscore")
    return config


def ocr_128() -> ConfigDict:
    """The published study of the training resolution: 128 px."""
    config = ocr()
    config.train.resolution = 128
    return config


def ocr_512() -> ConfigDict:
    """The published study of the training resolution: 512 px."""
    config = ocr()
    config.train.resolution = 512
    return config


def pickscore() -> ConfigDict:
    """Human preference with FLUX.1-dev."""
    config = ocr()
    config.dataset = "dataset/public-pickscore"  # python dataset/fetch.py pickscore
    config.sample.noise_level = 0.7
    config.train.reward_fn = {"pickscore": 1.0}
    config.test.reward_fn = {"pickscore": 1.0}
    guard(config, "clipscore")
    return config


def sd3_ocr() -> ConfigDict:
    """Stable Diffusion 3.5 medium without CFG: what most papers on objectives train."""
    config = ocr_512()
    sd3(config)
    config.sample.noise_level = 0.7
    config.sample.guidance_scale = 1.0
    return config


# --- the toy world of ../quickstart, on a CPU ----------------------------------------------------


def toy_t2is() -> ConfigDict:
    """Panels should agree, and images of a prompt differ.

    Half of the prompts leave part of the character open.
    """
    config = config_dict()
    toy(config)
    config.dataset = "../quickstart/out/world/prompts"
    config.pretrained.model = "../quickstart/models/flux"
    config.max_sequence_length = 32  # the toy model was built with it; the longest prompt has 31
    config.sample.latents_per_prompt = 4
    config.train.learning_rate = 1e-3
    # A LoRA of high rank on all linear layers is needed for images that differ (docs/rewards.md).
    config.train.lora_rank = 128
    config.train.lora_alpha = 256
    config.train.lora_targets = ".*"
    config.train.reward_fn = {
        "consistency_score": 1.0,
        "between_images": 8.0,
        "paco_toy.oracle:oracle_consistency": 0.0,  # monitored only
    }
    config.train.reward_fn_kwargs = {
        "consistency_score": {"model": "PaCo-Reward-Toy"},
        "between_images": {"model": "PaCo-Reward-Toy"},
    }
    config.train.aggregate_fn = "product_aggregate_fn"
    config.test.reward_fn = {
        "consistency_score": 1.0,
        "paco_toy.oracle:oracle_consistency": 1.0,
        "paco_toy.oracle:oracle_alignment": 1.0,
        "paco_toy.oracle:oracle_distinct": 1.0,
    }
    return config


def toy_t2is_nft() -> ConfigDict:
    """The quickstart: panels agree and choices stay open, where ppo learns little of either."""
    config = toy_t2is()
    without_noise(config)
    config.eval_freq = 16
    config.num_epochs = 16  # epochs end it, not the machine's speed
    config.train.loss_type = "nft"
    config.train.sigma_one = True
    return config


def toy_t2is_awm() -> ConfigDict:
    """As ``toy_t2is_nft``, and as long: its epochs are shorter."""
    config = toy_t2is()
    without_noise(config)
    config.eval_freq = 10
    config.num_epochs = 20
    config.train.loss_type = "awm"
    # The slow copy would be nearly what is trained, and cost a forward for each σ.
    config.train.awm_slow_beta = 0.0
    return config


def toy_t2is_sets() -> ConfigDict:
    """Two prompt sets, each with its own rewards: only open prompts are asked for variety."""
    config = toy_t2is_nft()
    folder = config.dataset
    config.dataset = ""
    config.train.reward_fn = {"consistency_score": 1.0}  # of sets that name no others
    config.datasets = {
        "full": {"folder": folder, "open": False, "share": 1.0},
        "open": {
            "folder": folder,
            "open": True,
            "share": 1.0,
            "reward_fn": {"consistency_score": 1.0, "between_images": 8.0},
        },
    }
    return config


def toy_people_t2is() -> ConfigDict:
    """Trained on votes; quickstart/votes.py lets the oracle vote."""
    config = toy_t2is()
    people(config)
    config.num_epochs = 20
    config.max_train_minutes = None
    config.test.reward_fn = {
        "paco_toy.oracle:oracle_consistency": 1.0,
        "paco_toy.oracle:oracle_alignment": 1.0,
    }
    for reward in config.test.reward_fn:
        config.train.reward_fn[reward] = 0.0  # monitored only
    return config


def toy_kontext() -> ConfigDict:
    """The toy editor."""
    config = kontext_editing()
    toy_editing(config)
    config.pretrained.model = "../quickstart/models/flux_kontext"
    config.max_sequence_length = 8  # the toy model was built with it; an instruction has 5
    return config


def toy_kontext_product() -> ConfigDict:
    """The toy editor on photos of a product, scored by a judge, as the real ones are."""
    config = toy_kontext()
    config.train.reward_fn = {"consistency_for_editing": 1.0}
    config.train.reward_fn_kwargs = {"consistency_for_editing": {"model": "PaCo-Reward-Toy"}}
    config.test.reward_fn = config.train.reward_fn
    guard(config, "kept_pixels")  # it needs no weights
    product(config)
    return config


# --- changes that several configurations share ---------------------------------------------------


def any_pipeline(config: ConfigDict) -> None:
    """Guidance, text length and steps of evaluations are what the pipeline does by itself."""
    config.sample.guidance_scale = None
    config.max_sequence_length = None
    config.test.num_steps = 0


def klein(config: ConfigDict) -> None:
    """FLUX.2 Klein is sampled with true CFG, with the empty negative prompt of its pipeline."""
    config.pretrained.model = "black-forest-labs/FLUX.2-klein-base-4B"
    config.sample.num_steps = 8
    config.sample.guidance_scale = 4.0
    config.test.num_steps = 28


def flux2(config: ConfigDict) -> None:
    """FLUX.2-dev has 32 billion weights, in 4 bits on one GPU; its guidance is embedded."""
    config.pretrained.model = "black-forest-labs/FLUX.2-dev"
    less_memory(config, 80)
    config.sample.guidance_scale = 4.0
    config.test.num_steps = 28


def qwen21(config: ConfigDict) -> None:
    """Qwen-Image-2.1 with the recommended number of steps."""
    config.pretrained.model = "Qwen/Qwen-Image-2.1"
    config.sample.guidance_scale = 1.0
    config.test.num_steps = 40


def longcat(config: ConfigDict) -> None:
    """LongCat's models are sampled with the empty negative prompt of their pipelines."""
    config.sample.guidance_scale = 4.5
    config.sample.negative_prompt = ""
    config.test.num_steps = 28


def sd3(config: ConfigDict) -> None:
    """Stable Diffusion 3.5 medium."""
    config.pretrained.model = "stabilityai/stable-diffusion-3.5-medium"
    config.max_sequence_length = 256  # its pipeline's default; padding tokens are attended to
    config.test.num_steps = 40


def people(config: ConfigDict) -> None:
    """24 votes an epoch. They are scarce: every epoch is saved, and has two steps on all of them."""
    without_noise(config)
    config.save_freq = 1
    config.sample.unique_sample_num_per_epoch = 4
    config.sample.num_images_per_prompt = 6
    config.sample.global_std = True  # the group's is smallest where one vote stands alone
    config.train.reward_fn = {"votes": 1.0}
    config.train.reward_fn_kwargs = {}
    config.train.aggregate_fn = None
    config.train.loss_type = "awm"
    config.train.awm_slow_beta = 0.0
    config.train.learning_rate = 3e-4
    config.train.adam_beta2 = 0.99
    config.train.gradient_step_per_epoch = 1
    config.train.num_inner_epochs = 2


def guard(config: ConfigDict, *rewards: str) -> None:
    """Evaluate ``rewards``, which are not trained."""
    for reward in rewards:
        config.test.reward_fn[reward] = 1.0


def toy(config: ConfigDict) -> None:
    """Small models on a CPU: train at 64 px, evaluate at 128 px."""
    config.item_size = "aspect"
    config.mixed_precision = "no"
    config.eval_freq = 20
    config.num_epochs = 200
    config.max_train_minutes = 5.0  # ends it first
    config.num_checkpoint_limit = 2
    config.sample.num_steps = 6
    config.sample.batch_size = 64
    config.sample.unique_sample_num_per_epoch = 8
    config.sample.noise_steps = (1,)
    # Images of a group differ only by the noise that is trained on.
    config.sample.same_latent = True
    config.train.resolution = 64
    config.train.batch_size = 64
    config.train.learning_rate = 2e-3
    config.train.adam_beta2 = 0.99
    config.train.gradient_step_per_epoch = 1
    config.train.lora_rank = 8
    config.train.lora_alpha = 16
    config.test.resolution = 128
    config.test.batch_size = 32
    config.test.num_steps = 10
    config.test.num_images = 128


def without_noise(config: ConfigDict) -> None:
    """Sampling, σ and KL weight for objectives that noise the finished images themselves."""
    config.sample.noise_level = 0.0
    config.sample.same_latent = False
    config.sample.latents_per_prompt = 1
    config.train.num_sigmas = 3
    config.train.beta = 0.02


def toy_editing(config: ConfigDict) -> None:
    """Editing in the toy world. The toy judge cannot judge edits, so the oracle is the reward."""
    toy(config)
    config.dataset = "../quickstart/out/editing/edits"
    config.prompt_fn = "geneval_image"
    config.train.reward_fn = {
        "paco_toy.edits:oracle_edit": 1.0,
        "paco_toy.edits:oracle_followed": 0.0,  # monitored only
        "paco_toy.edits:oracle_kept": 0.0,
    }
    config.train.reward_fn_kwargs = {}
    config.test.reward_fn = {}
    config.train.loss_type = "nft"  # short runs of ppo gained little
    config.train.timesteps = (1, 3)
    config.train.adv_clip_max = 1.0  # an advantage of one standard deviation counts fully
    config.sample.noise_level = 0.0
    config.sample.same_latent = False
    config.sample.num_images_per_prompt = 8
    config.sample.unique_sample_num_per_epoch = 16
    config.test.resolution = 64  # the toy bases are better at it than at 128 px


# --- suffixes: the memory of a GPU changes memory and speed, not what is trained -----------------


class Needs(NamedTuple):
    """What a model needs to fit; the defaults are right for 12 billion weights, such as FLUX.1."""

    four_bits: tuple[int, ...] = (24,)  # GB of the GPUs on which its frozen weights are in 4 bits
    recomputes: bool = False  # its activations on 80 GB too
    decoded: int = 4  # images of 1024 px at a time in an evaluation on 80 GB


_QWEN_IMAGE = Needs(four_bits=(24, 48), recomputes=True, decoded=2)  # 20 billion weights
# By the last part of a hub name or folder.
NEEDS = {
    "stable-diffusion-3.5-medium": Needs(four_bits=()),  # 2.5 billion weights
    "Qwen-Image": _QWEN_IMAGE,
    "Qwen-Image-2512": _QWEN_IMAGE,
    "Qwen-Image-Edit": _QWEN_IMAGE,
    "Qwen-Image-Edit-2509": _QWEN_IMAGE,
    "Qwen-Image-Edit-2511": _QWEN_IMAGE,
    "Qwen-Image-2.1": Needs(decoded=2),
    "Krea-2-Raw": Needs(recomputes=True),
    "Krea-2-Turbo": Needs(recomputes=True),
    "FLUX.2-klein-base-9B": Needs(recomputes=True),
    "FLUX.2-dev": Needs(four_bits=(24, 48, 80), recomputes=True),  # 32 billion weights
}


def needs(config: ConfigDict) -> Needs:
    """What the model of ``config`` needs."""
    return NEEDS.get(Path(config.pretrained.model).name, Needs())


def for_24gb(config: ConfigDict) -> None:
    """Most transformers in 4 bits (QLoRA, arXiv 2305.14314), all CLIP rewards on the CPU."""
    less_memory(config, 24, trained_clip=ON_CPU)


def for_48gb(config: ConfigDict) -> None:
    """Transformers of 20 billion weights in 4 bits, trained CLIP rewards in half precision."""
    less_memory(config, 48, trained_clip={"dtype": "float16"})


def for_80gb(config: ConfigDict) -> None:
    """Larger forwards of compiled blocks (layers in 4 bits cannot be compiled)."""
    model = needs(config)
    if 80 in model.four_bits:
        less_memory(config, 80)
    if model.recomputes:
        config.enable_gradient_checkpointing = True
    config.speed.compile = config.pretrained.quantize is None
    # 6 divides an epoch of 42 x 16 images on 1, 2, 4, 7 and 8 GPUs; 7 would raise it to 49 on 7.
    config.sample.batch_size = 6
    config.train.batch_size = 2
    config.test.batch_size = model.decoded if config.test.resolution > 512 else 4


def less_memory(config: ConfigDict, gigabytes: int, trained_clip: Mapping = {}) -> None:
    """Activations are recomputed; VAE (between uses) and guards that are CLIP are in main memory.

    Args:
        gigabytes: Of the GPU. The frozen transformer is in 4 bits, if its model needs that there.
        trained_clip: Arguments that CLIP rewards get which are trained.
    """
    config.enable_gradient_checkpointing = True
    config.speed.offload_vae = True
    if gigabytes in needs(config).four_bits:
        config.pretrained.quantize = "nf4"
    train = config.train
    test = config.test
    of_run = {**train.reward_fn_kwargs, **test.reward_fn_kwargs}
    place_clip(train.reward_fn, trained_clip, train.reward_fn_kwargs, {})
    guards = set(test.reward_fn) - set(train.reward_fn)
    place_clip(guards, ON_CPU, test.reward_fn_kwargs, train.reward_fn_kwargs)
    for set_options in config.datasets.values():
        trained = set_options.get("reward_fn", {})
        guards = set(set_options.get("test_reward_fn", {})) - set(trained or train.reward_fn)
        kwargs = dict(set_options.get("reward_fn_kwargs", {}))
        place_clip(trained, trained_clip, kwargs, of_run)
        place_clip(guards, ON_CPU, kwargs, of_run)
        if kwargs:
            set_options["reward_fn_kwargs"] = kwargs


def place_clip(rewards: Iterable, where: Mapping, kwargs: MutableMapping, of_run: Mapping) -> None:
    """Add ``where`` to the arguments in ``kwargs`` (otherwise ``of_run``) of ``rewards`` by CLIP.

    What the arguments already say stays, also that a server answers.
    """
    for reward in CLIP_REWARDS:
        arguments = dict(kwargs.get(reward) or of_run.get(reward) or {})
        if where and reward in rewards and "server" not in arguments:
            kwargs[reward] = {**where, **arguments}


def fast(config: ConfigDict) -> None:
    """Fewer steps and text tokens change the training images (docs/scaling.md)."""
    config.sample.tail_steps = 4  # of second order, after the last noise step
    if "LongCat" not in config.pretrained.model:  # its image's positions begin behind the padding
        config.train.max_sequence_length = 0  # no more padding than the longest prompt needs


def product(config: ConfigDict) -> None:
    """One product in new scenes, with an editor: photos of it are the references (docs/product.md).

    The judge compares each photo, cut to its box, with the image. Surroundings may change.
    """
    config.dataset = "dataset/product"  # examples/product.py writes it
    config.prompt_fn = "geneval_image"
    judge = dict(config.train.reward_fn_kwargs.get("consistency_for_editing", {}))
    judge["question"] = ["same_object", "editing_instruction"]
    config.train.reward_fn_kwargs.consistency_for_editing = judge


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
    config.train.loss_type = "nft"
    all_but_last(config)
    config.train.nft_beta = 0.1
    config.train.beta = 1e-4


def all_but_last(config: ConfigDict) -> None:
    """Sampling without noise, and training at the σ of all steps but the last."""
    config.sample.noise_level = 0.0
    config.train.num_sigmas = config.sample.num_steps - 1
    config.train.sigma_fraction = 0.99
    config.train.sigma_one = True


def awm(config: ConfigDict) -> None:
    """Advantage Weighted Matching (arXiv 2509.25050), with its KL weight for text rendering."""
    paper_settings(config, images=24, prompts=72)
    config.sample.noise_level = 0.0
    config.train.loss_type = "awm"
    config.train.beta = 3e-3
    config.train.ema_decay = 0.99


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


def dpo(config: ConfigDict) -> None:
    """Online Diffusion-DPO (arXiv 2311.12908) with the settings of Flow-GRPO's (2505.05470)."""
    paper_settings(config, images=24, prompts=48)
    config.train.loss_type = "dpo"
    all_but_last(config)
    config.train.learning_rate = 1e-5


def crd(config: ConfigDict) -> None:
    """CRD (arXiv 2603.14128), text rendering; its KL term is not weighted by the reward here."""
    paper_settings(config, images=24, prompts=48)
    config.train.loss_type = "crd"
    all_but_last(config)
    config.train.beta = 0.1


def opd(config: ConfigDict) -> None:
    """Diffusion-OPD (arXiv 2605.15055) at all steps but the last; teachers: train.opd_teachers."""
    config.train.loss_type = "opd"
    config.sample.noise_level = config.sample.noise_level or 0.7  # t2is_variety has none
    config.sample.noise_steps = tuple(range(config.sample.num_steps - 1))


SUFFIXES = {
    "_24gb": for_24gb,
    "_48gb": for_48gb,
    "_80gb": for_80gb,
    "_fast": fast,
    "_product": product,
    "_nft": nft,
    "_awm": awm,
    "_dgpo": dgpo,
    "_flow_dppo": flow_dppo,
    "_dpo": dpo,
    "_crd": crd,
    "_opd": opd,
}
