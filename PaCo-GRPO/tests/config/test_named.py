"""Named configurations hold the values of method §7, and pass the checks that a run begins with."""

import pytest
from named import CONFIG, NAMES, override

from paco_grpo.training.checks import check_config
from paco_grpo.training.configuration import config_to_yaml, load_config
from paco_grpo.training.plan import gradient_steps, make_plan


@pytest.mark.parametrize("name", NAMES)
def test_named_configuration_passes_its_checks(name, monkeypatch):
    config = override(name=name)
    if name.startswith("toy_"):  # paco_toy need not be installed for PaCo-GRPO's own tests
        for table in (config.train, config.test):
            table.reward_fn = type(table.reward_fn)({"consistency_score": 1.0}, allow_dotted_keys=True)
    check_config(config)


def test_t2is_is_the_published_table():
    config = override(name="t2is")
    assert config.pretrained.model == "black-forest-labs/FLUX.1-dev"
    assert (config.train.resolution, config.test.resolution) == (512, 1024)
    assert (config.sample.num_steps, config.test.num_steps) == (10, 20)
    assert (config.sample.noise_steps, config.sample.noise_level) == ((1,), 0.7)
    assert config.sample.guidance_scale == 3.5
    assert config.sample.global_std
    assert config.train.reward_fn.to_dict() == {"consistency_score": 0.2, "subfig_clipT": 1.0, "pickscore": 1.0}
    assert (config.sample.num_images_per_prompt, config.sample.unique_sample_num_per_epoch) == (16, 42)
    assert config.train.timesteps is None  # trained steps are the noise steps
    assert gradient_steps(config) == 2
    train = config.train
    assert (train.learning_rate, train.adam_beta1, train.adam_beta2, train.adam_weight_decay) == (
        3e-4,
        0.9,
        0.999,
        1e-4,
    )
    assert (train.adam_epsilon, train.max_grad_norm, train.clip_range, train.adv_clip_max) == (1e-8, 1.0, 1e-4, 5.0)
    assert (train.lora_rank, train.lora_alpha, train.ema_decay, train.ema_update_interval) == (64, 128, 0.9, 8)
    assert (config.seed, config.save_freq, config.eval_freq, config.num_checkpoint_limit) == (42, 10, 10, 5)
    assert (config.mixed_precision, config.max_sequence_length) == ("bf16", 512)


@pytest.mark.parametrize("name", ["kontext_editing", "qwen_editing"])
def test_editing_configurations_are_the_published_table(name):
    config = override(name=name)
    kontext = name == "kontext_editing"
    model = "black-forest-labs/FLUX.1-Kontext-dev" if kontext else "Qwen/Qwen-Image-Edit"
    assert config.pretrained.model == model
    assert (config.train.resolution, config.test.resolution) == (384, 512)
    assert (config.sample.num_steps, config.test.num_steps) == (8 if kontext else 10, 20)
    assert config.sample.noise_steps == ((1,) if kontext else (1, 2, 3, 4))
    assert config.train.timesteps is None  # trained steps are the noise steps
    assert config.sample.noise_level == (0.9 if kontext else 1.0)
    assert config.sample.guidance_scale == (2.5 if kontext else 4.0)
    assert config.sample.negative_prompt == (None if kontext else " ")  # true CFG
    assert not config.sample.global_std
    assert config.train.reward_fn.to_dict() == {"consistency_for_editing": 1.0}
    assert (config.sample.num_images_per_prompt, config.sample.unique_sample_num_per_epoch) == (16, 42)
    assert config.prompt_fn == "arrow_editing"


@pytest.mark.parametrize(("name", "resolution"), [("ocr", 256), ("ocr_128", 128), ("ocr_512", 512), ("pickscore", 256)])
def test_configurations_of_one_image_are_the_published_table(name, resolution):
    config = override(name=name)
    assert config.pretrained.model == "black-forest-labs/FLUX.1-dev"
    assert (config.train.resolution, config.test.resolution) == (resolution, 512)
    assert config.sample.noise_steps == (1,)
    assert config.sample.noise_level == (0.7 if name == "pickscore" else 0.8)
    assert config.train.reward_fn.to_dict() == {name.partition("_")[0]: 1.0}
    assert config.prompt_fn == "general_ocr"


def test_a_negative_prompt_may_be_a_space(tmp_path):
    config = override(("sample.negative_prompt", " "), name="kontext_editing")
    assert config.sample.negative_prompt == " "
    assert override(("sample.negative_prompt", "None"), name="qwen_editing").sample.negative_prompt is None
    assert override(("sample.negative_prompt", ""), name="qwen_editing").sample.negative_prompt is None
    saved = tmp_path / "config.yaml"
    saved.write_text(config_to_yaml(config))
    assert load_config(str(saved), CONFIG / "base.py").sample.negative_prompt == " "


def test_what_follows_is_derived_after_overrides():
    config = override(("train.loss_type", "nft"), name="t2is")
    assert gradient_steps(config) == 1
    config = override(("sample.batch_size", "4"), ("train.batch_size", "2"), name="t2is")
    plan = make_plan(config, 8)
    assert (plan.prompts, plan.samples, plan.samples_per_process) == (42, 672, 84)
    assert (plan.rollout_batches, plan.samples_per_step, plan.accumulation) == (21, 336, 21)
    assert plan.notes == ()
