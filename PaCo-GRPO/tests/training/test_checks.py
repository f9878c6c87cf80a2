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

from paco_grpo.data.prompts import DataError, load_prompts
from paco_grpo.objectives import Objective, Snapshot
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.policies import fewest_steps, size_multiple
from paco_grpo.policies.lora import lora_parameters
from paco_grpo.training.build import add_adapters
from paco_grpo.training.checks import check_items, check_model, check_run, check_writable
from paco_grpo.types import Item


class WithSnapshots(Objective):
    """An objective of a user, with copies of the LoRA."""

    names = ("old",)
    samples_from: int | None = None

    def __init__(self, train):
        super().__init__(train)
        for name in self.names:
            snapshot = Snapshot(name, decay=lambda step: 0.5, samples_from=self.samples_from)
            self.snapshots += (snapshot,)


def options_with_snapshots(model: Path, *overrides: tuple[str, str]) -> RunOptions:
    own = ("train.loss_type", f"{__name__}:WithSnapshots")
    plain = [("test.reward_fn", ""), ("train.reward_fn_kwargs", "")]
    return load_named("toy_t2is", ("pretrained.model", str(model)), own, *plain, *overrides)


def test_contradiction_names_the_option():
    options = load_named(
        "toy_t2is", ("test.reward_fn", ""), ("use_lora", "0"), ("train.loss_type", "nft")
    )
    with pytest.raises(ConfigError, match="^config.use_lora=False"):
        check_run(options)


class Tempered(Objective):
    """An objective of a user, with an argument, whose check returns nothing or one text."""

    def __init__(self, train, temperature):
        super().__init__(train)

    @classmethod
    def check(cls, options):
        if options.num_epochs == 0:
            return f"num_epochs=0 is too few for {cls.__name__}"


def test_arguments_of_the_objective_are_checked_before_weights_are_loaded(tiny_flux_dir):
    own = ("train.loss_type", f"{__name__}:Tempered")
    argument = ("train.loss_kwargs.temperature", "2")
    options = options_with_snapshots(tiny_flux_dir, own, argument)
    assert options.train.loss_kwargs == {"temperature": 2}
    assert check_run(options).snapshots == ()
    misspelled = ("train.loss_kwargs.temprature", "1")
    with pytest.raises(ConfigError, match=r"^config.train.loss_kwargs.*'temprature'"):
        check_run(options_with_snapshots(tiny_flux_dir, own, argument, misspelled))
    with pytest.raises(ConfigError, match="^config.num_epochs=0"):
        check_run(options_with_snapshots(tiny_flux_dir, own, argument, ("num_epochs", "0")))


@pytest.mark.parametrize(
    "names",
    [
        ("ema",),
        ("optimizer",),
        ("trainable",),
        ("start",),
        ("saved",),
        ("default",),
        ("old_default",),  # peft's file of the adapter "default" would hold it, too
        ("keys",),  # peft keeps adapters in a ModuleDict
        ("a.b",),
        ("../old",),
        ("",),
        ("old", "slow", "old"),
    ],
)
def test_a_snapshot_has_a_name_of_its_own(tiny_flux_dir, monkeypatch, names):
    monkeypatch.setattr(WithSnapshots, "names", names)
    with pytest.raises(ConfigError, match=f"^config.train.loss_type=.*snapshot {names[0]!r}"):
        check_run(options_with_snapshots(tiny_flux_dir))


def test_a_snapshot_may_be_called_like_a_part_of_the_model(tiny_flux_dir, monkeypatch):
    monkeypatch.setattr(WithSnapshots, "names", ("attn", "attn_2"))
    options = options_with_snapshots(tiny_flux_dir)
    objective = check_run(options)
    policy = load("flux", tiny_flux_dir)
    add_adapters(policy, options, objective)
    trained = set(lora_parameters(policy, "default"))
    for name in ("attn", "attn_2"):
        copies = lora_parameters(policy, name)
        assert len(copies) == len(trained)
        assert trained.isdisjoint(copies)


def test_noise_steps_that_a_snapshot_samples_keep_their_log_probabilities(
    tiny_flux_dir, monkeypatch
):
    """Recomputed, they would be those of the trained weights, which did not sample."""
    for samples_from, mode, is_refused in (
        (0, "auto", True),
        (200, "recompute", True),
        (0, "rollout", False),
        (None, "recompute", False),
    ):
        monkeypatch.setattr(WithSnapshots, "samples_from", samples_from)
        options = options_with_snapshots(tiny_flux_dir, ("train.old_log_prob", mode))
        refused = pytest.raises(ConfigError, match=f"^config.train.old_log_prob='{mode}'.*'old'")
        with refused if is_refused else contextlib.nullcontext():
            check_run(options)
    monkeypatch.setattr(WithSnapshots, "samples_from", 0)
    monkeypatch.setattr(WithSnapshots, "needs_noise_steps", False)
    check_run(options_with_snapshots(tiny_flux_dir))


def test_an_objective_that_needs_no_noise_steps_takes_images_without(tiny_flux_dir, monkeypatch):
    without_noise = ("sample.noise_level", "0")
    with pytest.raises(ConfigError, match="^config.sample.noise_level=0"):
        check_run(options_with_snapshots(tiny_flux_dir, without_noise))
    monkeypatch.setattr(WithSnapshots, "needs_noise_steps", False)
    check_run(options_with_snapshots(tiny_flux_dir, without_noise))


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
    with pytest.raises(DataError, match=r"python dataset/fetch\.py (sharegpt-4o-image|ocr)`"):
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
    policy = load(name, folder)
    fewest = fewest_steps(folder)
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
