"""Checks that need objectives, rewards, libraries or a model's small files run before weights are
loaded.
"""

import contextlib
import json
import logging
import shutil
from pathlib import Path

import pytest
from named import load as load_named
from tiny_policies import load

from paco_grpo.data.prompts import load_prompts
from paco_grpo.objectives import Objective
from paco_grpo.options import ConfigError
from paco_grpo.policies import fewest_steps, size_multiple
from paco_grpo.training.checks import check_items, check_run, model_problems
from paco_grpo.types import Item
from paco_judge.errors import UserError


class OnCleanImages(Objective):
    """An objective of a user."""

    needs_noise_steps = False


def test_contradiction_names_the_option():
    options = load_named(
        "toy_t2is", ("test.reward_fn", ""), ("use_lora", "0"), ("train.loss_type", "nft")
    )
    with pytest.raises(ConfigError, match="^config.use_lora=False"):
        check_run(options)


def test_an_objective_that_needs_no_noise_steps_takes_images_without(tiny_flux_dir):
    plain = {
        "pretrained.model": str(tiny_flux_dir),
        "test.reward_fn": "",
        "train.reward_fn_kwargs": "",
        "sample.noise_level": "0",
    }
    with pytest.raises(ConfigError, match="^config.sample.noise_level=0"):
        check_run(load_named("toy_t2is", *plain.items(), ("train.loss_type", "ppo")))
    own = ("train.loss_type", f"{__name__}:OnCleanImages")
    assert check_run(load_named("toy_t2is", *plain.items(), own)).snapshots == ()


def test_all_contradictions_are_named_at_once(tiny_flux_dir):
    changes = {
        "pretrained.model": str(tiny_flux_dir),
        "train.resolution": "60",
        "sample.noise_steps": "1,1,2",
        "sample.num_noise_steps": "3",
        "train.loss_type": "awm",
        "train.loss_kwargs.temprature": "1",
        "use_lora": "False",
    }
    with pytest.raises(ConfigError) as refused:
        check_run(load_named("toy_t2is", *changes.items()))
    lines = str(refused.value).splitlines()
    for start in ("train.resolution=60", "sample.num_noise_steps=3", "train.loss_kwargs"):
        assert any(line.startswith(f"config.{start}") for line in lines), start


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


@pytest.mark.parametrize(
    ("facts", "overrides", "warns"),
    [
        ({}, {}, False),
        ({"is_distilled": True}, {}, True),
        ({"_name_or_path": "Tongyi-MAI/Z-Image-Turbo"}, {}, True),
        ({}, {"test.num_steps": "8", "sample.guidance_scale": "0"}, True),
        ({}, {"test.num_steps": "8", "sample.guidance_scale": "3.5"}, False),
        ({}, {"test.num_steps": "28", "sample.guidance_scale": "0"}, False),
    ],
)
@pytest.mark.parametrize("objective", ["ppo", "nft", "awm", "dgpo"])
def test_objectives_that_a_distilled_model_does_not_bear(
    tiny_flux_dir, tmp_path, caplog, facts, overrides, warns, objective
):
    model = shutil.copytree(tiny_flux_dir, tmp_path / "model")
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps(index | facts))
    changes = overrides | {
        "pretrained.model": str(model),
        "train.loss_type": objective,
        "test.reward_fn": "",
        "train.num_sigmas": "3",
        "train.reward_fn": "jpeg_compressibility: 1",
        "train.reward_fn_kwargs": "",
    }
    check_run(load_named("toy_t2is", *changes.items()))
    assert ("distilled" in caplog.text) == (warns and objective != "ppo")


def test_turbo_is_known_to_be_distilled_without_its_files(tiny_flux_dir, caplog):
    changes = {"pretrained.model": str(tiny_flux_dir), "train.loss_type": "nft"}
    check_run(load_named("z_image_turbo_t2is", *changes.items()))
    assert "distilled" in caplog.text


def test_a_tail_without_noise_is_said_to_change_nothing(tiny_flux_dir, caplog):
    check_run(load_named("t2is_fast_nft", ("pretrained.model", str(tiny_flux_dir))))
    assert "sample.tail_steps=4 changes nothing" in caplog.text


@pytest.mark.parametrize("name", ["kontext_editing", "ocr"])
def test_a_missing_public_set_names_its_download(name):
    options = load_named(name, ("dataset", f"/nowhere/{Path(load_named(name).dataset).name}"))
    with pytest.raises(UserError, match=r"python dataset/fetch\.py (sharegpt-4o-image|ocr)`"):
        load_prompts(options.dataset, "train", options.prompt_fn)


def test_prompt_set_must_suit_the_model(tiny_folder):
    several = Item(1, "x", references=("one", "two", "three"))
    for name, item, fits in (
        ("flux", Item(0, "x", references=("a picture",)), False),
        ("flux_kontext", Item(0, "x"), False),
        ("flux_kontext", several, False),
        ("qwen_image_edit_plus", several, True),
    ):
        options = load_named("toy_t2is", ("pretrained.model", str(tiny_folder(name))))
        with contextlib.nullcontext() if fits else pytest.raises(UserError, match="train items"):
            check_items(options, {"train": [item]})


def test_sizes_of_items_are_checked_before_the_model_is_loaded(tiny_flux_dir, caplog):
    thin = {"train": [Item(0, "x"), Item(1, "y", height=1, width=65536)]}
    options = load_named(
        "toy_t2is", ("pretrained.model", str(tiny_flux_dir)), ("item_size", "exact")
    )
    with pytest.raises(UserError, match="item 1 of the train items .*1x65536"):
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
    policy = load(name, folder)
    fewest = fewest_steps(folder)
    assert (
        size_multiple(folder) == policy.size_multiple
        and len(policy.sigmas(fewest, 32, 32)) == fewest + 1
    )
    changes = {"pretrained.model": str(folder), "test.num_steps": "1", "train.resolution": "60"}
    problems = model_problems(load_named("toy_t2is", *changes.items()))
    assert problems[-1].startswith("train.resolution=60 ")
    assert problems[0].startswith("test.num_steps=1 ") == (fewest > 1)
