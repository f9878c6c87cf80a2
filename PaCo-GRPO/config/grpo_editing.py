"""Editing.

Use as config/grpo.py:NAME.
"""

from grpo_models import flux2, klein, longcat, qwen21
from grpo_t2is import for_24gb, for_80gb, guard
from ml_collections import ConfigDict

from paco_grpo.options import config_dict


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
    config.test.reward_fn = config.train.reward_fn.to_dict()
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


def qwen_editing_48gb() -> ConfigDict:
    """``qwen_editing`` on a GPU of 48 GB: 20 billion weights, so in 4 bits already."""
    config = qwen_editing()
    for_24gb(config)
    return config


def qwen_editing_80gb() -> ConfigDict:
    """``qwen_editing`` on a GPU of 80 GB, of which the weights take 38."""
    config = qwen_editing()
    for_80gb(config)
    config.enable_gradient_checkpointing = True
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


def qwen_editing_2511_48gb() -> ConfigDict:
    """``qwen_editing_2511`` on a GPU of 48 GB."""
    config = qwen_editing_2511()
    for_24gb(config)
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
