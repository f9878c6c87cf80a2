"""Image sets with other generators, and one image for a prompt.

Use as config/grpo.py:NAME.
"""

from grpo_t2is import clip_in_half, clip_on_cpu, for_24gb, for_48gb, for_80gb, guard, t2is
from ml_collections import ConfigDict

from paco_grpo.options import config_dict


def t2is_qwen() -> ConfigDict:
    """Qwen-Image-2512, with true CFG."""
    config = t2is()
    config.pretrained.model = "Qwen/Qwen-Image-2512"
    config.sample.noise_level = 1.0
    config.sample.guidance_scale = 4.0
    config.sample.negative_prompt = " "
    return config


def t2is_qwen_48gb() -> ConfigDict:
    """``t2is_qwen`` on a GPU of 48 GB: 20 billion weights, so in 4 bits already."""
    config = t2is_qwen()
    for_24gb(config)
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


def sd3_t2is_24gb() -> ConfigDict:
    """``sd3_t2is`` on a GPU of 24 GB, which its 2.5 billion weights do not fill."""
    config = sd3_t2is()
    for_48gb(config)
    clip_on_cpu(config)
    return config


def sd3_large_t2is() -> ConfigDict:
    """Stable Diffusion 3.5 large, with true CFG."""
    config = sd3_t2is()
    config.pretrained.model = "stabilityai/stable-diffusion-3.5-large"
    return config


def sd3_large_t2is_24gb() -> ConfigDict:
    """``sd3_large_t2is`` on a GPU of 24 GB."""
    config = sd3_large_t2is()
    for_24gb(config)
    clip_on_cpu(config)
    return config


def z_image_t2is() -> ConfigDict:
    """Z-Image, with true CFG."""
    config = t2is()
    config.pretrained.model = "Tongyi-MAI/Z-Image"
    config.sample.guidance_scale = 4.0
    config.sample.negative_prompt = ""
    config.test.num_steps = 28
    return config


def z_image_t2is_24gb() -> ConfigDict:
    """``z_image_t2is`` on a GPU of 24 GB."""
    config = z_image_t2is()
    for_24gb(config)
    clip_on_cpu(config)
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


def krea_t2is_80gb() -> ConfigDict:
    """``krea_t2is`` on a GPU of 80 GB, which its activations would fill."""
    config = krea_t2is()
    for_80gb(config)
    config.enable_gradient_checkpointing = True
    return config


def krea_t2is_48gb() -> ConfigDict:
    """``krea_t2is`` on a GPU of 48 GB."""
    config = krea_t2is()
    for_48gb(config)
    clip_in_half(config)
    return config


def krea_t2is_24gb() -> ConfigDict:
    """``krea_t2is`` on a GPU of 24 GB."""
    config = krea_t2is()
    for_24gb(config)
    clip_on_cpu(config)
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


def longcat_t2is_24gb() -> ConfigDict:
    """``longcat_t2is`` on a GPU of 24 GB."""
    config = longcat_t2is()
    for_24gb(config)
    clip_on_cpu(config)
    return config


# --- one image for a prompt -----------------------------------------------------------------------


def ocr() -> ConfigDict:
    """Text rendering with FLUX.1-dev: train at 256 px, evaluate at 512 px."""
    config = config_dict()
    config.dataset = "dataset/public-ocr"  # python dataset/fetch.py ocr
    config.prompt_fn = "general_ocr"  # one prompt a line
    config.train.resolution = 256
    config.test.resolution = 512
    config.test.num_images = 256
    config.sample.noise_level = 0.8
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


# --- generators -----------------------------------------------------------------------------------


def klein(config: ConfigDict) -> None:
    """FLUX.2 Klein is sampled with true CFG, with the empty negative prompt of its pipeline."""
    config.pretrained.model = "black-forest-labs/FLUX.2-klein-base-4B"
    config.sample.num_steps = 8
    config.sample.guidance_scale = 4.0
    config.test.num_steps = 28


def flux2(config: ConfigDict) -> None:
    """FLUX.2-dev has 32 billion weights, in 4 bits on one GPU; its guidance is embedded."""
    for_24gb(config)
    config.pretrained.model = "black-forest-labs/FLUX.2-dev"
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
