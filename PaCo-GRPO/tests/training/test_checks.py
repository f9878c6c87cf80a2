"""Checks that need objectives, rewards, libraries or a model's small files run before weights are loaded."""

import contextlib
import logging
from pathlib import Path

import pytest
from named import load as load_named
from tiny_policies import load

from paco_grpo.data.prompts import DataError, load_prompts
from paco_grpo.options import ConfigError
from paco_grpo.policies import fewest_steps, size_multiple
from paco_grpo.training.checks import check_items, check_model, check_run, check_writable
from paco_grpo.types import Item


def test_contradiction_names_the_option():
    options = load_named(
        "toy_t2is", ("test.reward_fn", ""), ("use_lora", "0"), ("train.loss_type", "nft")
    )
    with pytest.raises(ConfigError, match="^config.use_lora=False"):
        check_run(options)


def test_options_that_train_nothing_are_warned_about(tiny_flux_dir, caplog):
    changes = {
        "sample.num_images_per_prompt": "1",
        "sample.latents_per_prompt": "1",
        "train.learning_rate": "0",
    }
    changes |= {
        "pretrained.model": str(tiny_flux_dir),
        "test.reward_fn": "",
        "train.reward_fn_kwargs": "",
    }
    check_run(load_named("toy_t2is", *changes.items()))
    assert "sample.num_images_per_prompt" in caplog.text and "train.learning_rate" in caplog.text


@pytest.mark.parametrize("name", ["kontext_editing", "ocr"])
def test_a_missing_public_set_names_its_download(name):
    options = load_named(name, ("dataset", f"/nowhere/{Path(load_named(name).dataset).name}"))
    with pytest.raises(DataError, match=r"python dataset/fetch\.py (sharegpt-4o-image|ocr)`"):
        load_prompts(options.dataset, "train", options.prompt_fn)


def test_prompt_set_must_suit_the_model(tiny_folder):
    several = Item(1, "x", image="one", more_images=("two", "three"))
    for name, item, fits in (
        ("flux", Item(0, "x", image="a picture"), False), ("flux_kontext", Item(0, "x"), False),
        ("flux_kontext", several, False), ("qwen_image_edit_plus", several, True),
    ):  # fmt: skip
        options = load_named("toy_t2is", ("pretrained.model", str(tiny_folder(name))))
        with contextlib.nullcontext() if fits else pytest.raises(DataError, match="train items"):
            check_items(options, {"train": [item]})


def test_sizes_of_items_are_checked_before_the_model_is_loaded(tiny_flux_dir, caplog):
    thin = {"train": [Item(0, "x"), Item(1, "y", height=1, width=65536)]}
    options = load_named(
        "toy_t2is", ("pretrained.model", str(tiny_flux_dir)), ("item_size", "exact")
    )
    with pytest.raises(DataError, match="item 1 of the train items .*1x65536"):
        check_items(options, thin)
    with caplog.at_level(logging.INFO):
        check_items(
            load_named(
                "toy_t2is", ("pretrained.model", str(tiny_flux_dir)), ("item_size", "aspect")
            ),
            thin,
        )
    assert "1 of the train items" in caplog.text


@pytest.mark.parametrize("name", ["flux", "qwen_image_edit"])
def test_limits_of_a_model_are_known_without_its_weights(tiny_folder, name):
    folder = tiny_folder(name)
    policy, fewest = load(name, folder), fewest_steps(folder)
    assert (
        size_multiple(folder) == policy.size_multiple
        and len(policy.sigmas(fewest, 32, 32)) == fewest + 1
    )
    changes = {"pretrained.model": str(folder), "test.num_steps": "1", "train.resolution": "60"}
    with pytest.raises(ConfigError, match="config.train.resolution=60 ") as caught:
        check_model(load_named("toy_t2is", *changes.items()))
    assert ("config.test.num_steps=1 " in str(caught.value)) == (fewest > 1)


def test_unusable_folder_names_the_option(tmp_path):
    (tmp_path / "file").write_text("")
    for option in ("config.save_dir", "--output"):
        with pytest.raises(ConfigError, match=f"cannot write.*set {option} to another"):
            check_writable(tmp_path / "file" / "runs", option=option)
    with pytest.raises(ConfigError, match="MiB free.*config.save_dir"):
        check_writable(tmp_path, needed_bytes=1 << 60)
