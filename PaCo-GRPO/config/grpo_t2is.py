"""Image sets with FLUX.1-dev, the suffixes for memory, and changes that recipes share.

Use as config/grpo.py:NAME.
"""

from ml_collections import ConfigDict

from paco_grpo.options import config_dict

CLIP_REWARDS = ("clipscore", "pickscore", "reference_clipI", "subfig_clipI", "subfig_clipT")


def t2is() -> ConfigDict:
    """FLUX.1-dev: train at 512 px, evaluate at 1024 px."""
    config = config_dict()
    config.dataset = "dataset/T2IS"
    config.item_size = "aspect"  # one prompt set serves every resolution
    config.sample.global_std = True
    config.train.reward_fn = {"consistency_score": 0.2, "subfig_clipT": 1.0, "pickscore": 1.0}
    # The judge on this machine's port 8000; elsewhere add "port", "host" or "base_url".
    config.train.reward_fn_kwargs = {"consistency_score": {"model": "PaCo-Reward-7B"}}
    config.test.reward_fn = config.train.reward_fn.to_dict()
    guard(config, "subfig_clipI", "clipscore")
    return config


def t2is_24gb() -> ConfigDict:
    """``t2is`` on a GPU of 24 GB; the CLIP rewards score on the CPU while images are sampled."""
    config = t2is()
    for_24gb(config)
    clip_on_cpu(config)
    return config


def t2is_48gb() -> ConfigDict:
    """``t2is`` on a GPU of 48 GB; the CLIP rewards in half precision leave room for T5."""
    config = t2is()
    for_48gb(config)
    clip_in_half(config)
    return config


def t2is_variety() -> ConfigDict:
    """Consistency × variety: panels agree, and images of a prompt that leaves a choice differ.

    Rewards, objective and its settings are those of the quickstart, on FLUX.1-dev.
    """
    config = t2is()
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


# --- suffixes: the memory of a GPU changes memory and speed, not what is trained ------------------


def for_80gb(config: ConfigDict) -> None:
    """Larger forwards of compiled blocks."""
    config.speed.compile = True
    # 6 divides an epoch of 42 x 16 images on 1, 2, 4, 7 and 8 GPUs; 7 would raise it to 49 on 7.
    config.sample.batch_size = 6
    config.train.batch_size = 2
    config.test.batch_size = 4


def for_48gb(config: ConfigDict) -> None:
    """Activations are recomputed; VAE (between uses) and guards are in main memory."""
    config.enable_gradient_checkpointing = True
    config.speed.offload_vae = True
    guards_on_cpu(config.train.reward_fn, config.test.reward_fn, config.test.reward_fn_kwargs)
    for of_set in config.datasets.values():
        trained = of_set.get("reward_fn") or config.train.reward_fn
        kwargs = dict(of_set.get("reward_fn_kwargs", {}))
        guards_on_cpu(trained, of_set.get("test_reward_fn", {}), kwargs)
        if kwargs:
            of_set["reward_fn_kwargs"] = kwargs


def guards_on_cpu(trained: dict, tested: dict, kwargs: dict) -> None:
    """Guards that are CLIP models are in main memory."""
    for reward in tested:
        if reward in CLIP_REWARDS and reward not in trained:
            kwargs[reward] = {"device": "cpu"}


def for_24gb(config: ConfigDict) -> None:
    """Also the frozen transformer in 4 bits (QLoRA, arXiv 2305.14314), which rounds its weights."""
    for_48gb(config)
    config.pretrained.quantize = "nf4"


def fast(config: ConfigDict) -> None:
    """Fewer steps and text tokens change the training images (docs/scaling.md)."""
    config.sample.tail_steps = 4  # of second order, after the last noise step
    if "LongCat" not in config.pretrained.model:  # its image's positions begin behind the padding
        config.train.max_sequence_length = 0  # no more padding than the longest prompt needs


# --- changes that several configurations share ----------------------------------------------------


def guard(config: ConfigDict, *rewards: str) -> None:
    """Evaluate ``rewards``, which are not trained."""
    for reward in rewards:
        config.test.reward_fn[reward] = 1.0


def clip_on_cpu(config: ConfigDict) -> None:
    """The two CLIP models of ``t2is`` score on the CPU."""
    config.train.reward_fn_kwargs.subfig_clipT = {"device": "cpu"}
    config.train.reward_fn_kwargs.pickscore = {"device": "cpu"}


def clip_in_half(config: ConfigDict) -> None:
    """The two CLIP models of ``t2is`` in half precision leave room for the text encoder."""
    config.train.reward_fn_kwargs.subfig_clipT = {"dtype": "float16"}
    config.train.reward_fn_kwargs.pickscore = {"dtype": "float16"}
    config.test.reward_fn_kwargs.subfig_clipI = {"dtype": "float16"}  # the model of subfig_clipT


def without_noise(config: ConfigDict) -> None:
    """Sampling, σ and KL weight for objectives that noise the finished images themselves."""
    config.sample.noise_level = 0.0
    config.sample.same_latent = False
    config.sample.latents_per_prompt = 1
    config.train.num_sigmas = 3
    config.train.beta = 0.02
