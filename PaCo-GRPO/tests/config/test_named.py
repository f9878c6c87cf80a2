"""Named configurations hold the values of docs/method.md §7."""

import pytest
from named import CONFIG

from paco_grpo.options import load_options


def load(name):
    return load_options(f"{CONFIG / 'grpo.py'}:{name}")


def test_t2is_is_the_published_table():
    options = load("t2is")
    assert options.pretrained.model == "black-forest-labs/FLUX.1-dev"
    assert (options.train.resolution, options.test.resolution) == (512, 1024)
    assert (options.sample.num_steps, options.test.num_steps) == (10, 20)
    assert (options.sample.noise_steps, options.sample.noise_level) == ((1,), 0.7)
    assert options.sample.guidance_scale == 3.5
    assert options.sample.global_std
    assert options.train.reward_fn == {"consistency_score": 0.2, "subfig_clipT": 1.0, "pickscore": 1.0}
    assert (options.sample.num_images_per_prompt, options.sample.unique_sample_num_per_epoch) == (16, 42)
    assert options.train.timesteps is None  # trained steps are the noise steps
    train = options.train
    assert train.gradient_step_per_epoch is None  # the objective's default
    assert (train.learning_rate, train.adam_weight_decay) == (3e-4, 1e-4)
    assert (train.adam_beta1, train.adam_beta2) == (0.9, 0.999)
    assert (train.adam_epsilon, train.max_grad_norm, train.clip_range, train.adv_clip_max) == (1e-8, 1.0, 1e-4, 5.0)
    assert (train.lora_rank, train.lora_alpha, train.ema_decay, train.ema_update_interval) == (64, 128, 0.9, 8)
    assert (options.seed, options.save_freq, options.eval_freq, options.num_checkpoint_limit) == (42, 10, 10, 5)
    assert (options.mixed_precision, options.max_sequence_length) == ("bf16", 512)


@pytest.mark.parametrize("name", ["kontext_editing", "qwen_editing"])
def test_editing_configurations_are_the_published_table(name):
    options = load(name)
    kontext = name == "kontext_editing"
    model = "black-forest-labs/FLUX.1-Kontext-dev" if kontext else "Qwen/Qwen-Image-Edit"
    assert options.pretrained.model == model
    assert (options.train.resolution, options.test.resolution) == (384, 512)
    assert (options.sample.num_steps, options.test.num_steps) == (8 if kontext else 10, 20)
    assert options.sample.noise_steps == ((1,) if kontext else (1, 2, 3, 4))
    assert options.train.timesteps is None  # trained steps are the noise steps
    assert options.sample.noise_level == (0.9 if kontext else 1.0)
    assert options.sample.guidance_scale == (2.5 if kontext else 4.0)
    assert options.sample.negative_prompt == (None if kontext else " ")  # true CFG
    assert not options.sample.global_std
    assert options.train.reward_fn == {"consistency_for_editing": 1.0}
    assert (options.sample.num_images_per_prompt, options.sample.unique_sample_num_per_epoch) == (16, 42)
    assert options.prompt_fn == "arrow_editing"


@pytest.mark.parametrize(("name", "resolution"), [("ocr", 256), ("ocr_128", 128), ("ocr_512", 512), ("pickscore", 256)])
def test_configurations_of_one_image_are_the_published_table(name, resolution):
    options = load(name)
    assert options.pretrained.model == "black-forest-labs/FLUX.1-dev"
    assert (options.train.resolution, options.test.resolution) == (resolution, 512)
    assert options.sample.noise_steps == (1,)
    assert options.sample.noise_level == (0.7 if name == "pickscore" else 0.8)
    assert options.train.reward_fn == {name.partition("_")[0]: 1.0}
    assert options.prompt_fn == "general_ocr"
