"""Checks that need objectives, rewards, libraries or a model's small files, before any model is loaded."""

import pytest
import torch
from named import load as load_named
from tiny_policies import NAMES, load

from paco_grpo.data.prompts import DataError
from paco_grpo.options import ConfigError
from paco_grpo.policies import fewest_steps, size_multiple
from paco_grpo.training.checks import check_device, check_images, check_model, check_run, check_writable
from paco_grpo.types import Item


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([("sample.noise_steps", "")], "sample.noise_steps is empty"),
        ([("sample.noise_level", "0")], "sample.noise_level=0"),
        ([("train.timesteps", "2")], "train.timesteps has step 2"),
        ([("train.timesteps", "1"), ("sample.num_noise_steps", "1")], "cannot be combined with sample.num_noise"),
        ([("train.timesteps", "9"), ("train.loss_type", "nft")], "train.timesteps has step 9, but sample.num_steps=6"),
        ([("sample.noise_steps", ""), ("train.loss_type", "nft")], "train.timesteps is None"),
        ([("sample.cps", "1"), ("train.loss_type", "guard_grpo")], "sample.cps=True"),
        ([("train.decay_type", "1")], "train.decay_type=1 has no effect"),
        ([("train.decay_type", "7"), ("train.loss_type", "nft")], "train.decay_type=7"),
        ([("use_lora", "0"), ("train.loss_type", "nft")], "use_lora=False"),
        ([("train.gradient_step_per_epoch", "200")], "train.gradient_step_per_epoch=200"),
        ([("train.loss_type", "pppo")], "train.loss_type='pppo' is unknown: did you mean 'ppo'"),
        ([("logging_platform", "wandbb")], "Did you mean 'wandb'"),
        ([("prompt_fn", "geneva")], "Did you mean 'geneval'"),
        ([("train.reward_fn.consistency_scor", "1")], "Did you mean 'consistency_score'"),
        ([("train.reward_fn.nowhere.mod:f", "1")], "cannot be imported"),
        (
            [("speed.attention", "native_cudnn")],
            "speed.attention='native_cudnn' is not known. Did you mean '_native_cudnn'",
        ),
        ([("speed.attention", "sage")], "speed.attention='sage' has no backward, so it cannot train"),
        ([("speed.attention", "flash")], "speed.attention='flash' cannot be used here"),
    ],
)
def test_contradiction_names_the_field(pairs, said):
    config = load_named("toy_t2is", ("test.reward_fn", ""), *pairs)
    with pytest.raises(ConfigError) as caught:
        check_run(config)
    assert said in str(caught.value)
    assert str(caught.value).startswith("config.")


def small_files(folder, pipeline="FluxPipeline", vae='{"block_out_channels": [4, 8, 8]}'):
    """What is known of a model before its weights are read."""
    (folder / "vae").mkdir(parents=True)
    (folder / "vae" / "config.json").write_text(vae)
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    (folder / "model_index.json").write_text(f'{{"_class_name": "{pipeline}"}}')
    return folder


@pytest.mark.parametrize(
    ("pipeline", "vae"),
    [
        ("FluxPipeline", '{"block_out_channels": [4, 8, 8]}'),
        ("QwenImageEditPipeline", '{"temperal_downsample": [false, true]}'),
    ],
)
def test_resolution_must_fit_the_model(tmp_path, pipeline, vae):
    small_files(tmp_path, pipeline, vae)
    config = load_named(
        "toy_t2is", ("pretrained.model", str(tmp_path)), ("train.resolution", "60"), ("test.resolution", "64")
    )
    with pytest.raises(ConfigError, match="config.train.resolution=60 is not a multiple of 8") as caught:
        check_model(config)
    assert "test.resolution" not in str(caught.value)


def test_resolution_must_fit_the_hub_s_model(tmp_path, monkeypatch):
    from huggingface_hub import constants

    commit = "0" * 40
    folder = tmp_path / "models--someone--something"
    small_files(folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    config = load_named("toy_t2is", ("pretrained.model", "someone/something"), ("test.resolution", "100"))
    with pytest.raises(ConfigError, match="config.test.resolution=100 is not a multiple of 8, as someone/something"):
        check_model(config)


def test_negative_prompt_needs_true_cfg(tmp_path):
    config = load_named("toy_t2is", ("pretrained.model", str(small_files(tmp_path))), ("sample.negative_prompt", " "))
    with pytest.raises(ConfigError, match="config.sample.negative_prompt=' ' is set, but .* leave it at None"):
        check_model(config)


@pytest.mark.parametrize(
    ("pipeline", "image", "said"),
    [
        (
            "FluxPipeline",
            "a picture",
            "generates from text alone, but the train items .* have reference images .config.prompt_fn",
        ),
        ("FluxKontextPipeline", None, "edits images, but the train items .* have none: config.prompt_fn"),
    ],
)
def test_prompt_set_must_be_of_the_model_s_kind(tmp_path, pipeline, image, said):
    config = load_named("toy_t2is", ("pretrained.model", str(small_files(tmp_path, pipeline))))
    with pytest.raises(DataError, match=said):
        check_images(config, {"train": [Item(0, "x", image=image)]})


@pytest.mark.parametrize("name", NAMES)
def test_size_multiple_is_known_without_the_weights(tiny_folder, name):
    assert size_multiple(tiny_folder(name)) == load(name, tiny_folder(name)).size_multiple


@pytest.mark.parametrize("name", NAMES)
def test_fewest_steps_are_known_without_the_weights(tiny_folder, name):
    fewest = fewest_steps(tiny_folder(name))
    assert len(load(name, tiny_folder(name)).sigmas(fewest, 32, 32)) == fewest + 1
    config = load_named("toy_t2is", ("pretrained.model", str(tiny_folder(name))), ("test.num_steps", "1"))
    if fewest > 1:
        with pytest.raises(ConfigError, match=r"config.test.num_steps=1 must be at least 2"):
            check_model(config)
    else:
        check_model(config)


def test_a_large_model_on_a_cpu_is_a_warning(tmp_path, caplog):
    folder = small_files(tmp_path)
    config = load_named("toy_t2is", ("pretrained.model", str(folder)))
    check_device(config, torch.device("cpu"))
    assert not caplog.records
    (folder / "transformer").mkdir()
    index = folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text('{"metadata": {"total_size": 23802816640}}')
    check_device(config, torch.device("cuda"))
    assert not caplog.records
    check_device(config, torch.device("cpu"))
    assert "sees no GPU" in caplog.text


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="config.save_dir"):
        check_writable(tmp_path / "file" / "runs")


def test_no_space_left(tmp_path):
    with pytest.raises(ConfigError, match="MiB free, but checkpoints of this run need"):
        check_writable(tmp_path, needed_bytes=1 << 60)
