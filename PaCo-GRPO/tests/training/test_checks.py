"""Checks that need objectives, rewards, libraries or a model's small files run before weights are
loaded.
"""

import contextlib
import json
from pathlib import Path

import pytest
from named import load as load_named
from tiny_policies import load

from paco_grpo.data.prompts import load_prompts
from paco_grpo.objectives import create_objective
from paco_grpo.policies import PolicyLoadError, fewest_steps
from paco_grpo.policies.loading import is_step_distilled
from paco_grpo.training.checks import check_adapters, check_items, questionable
from paco_grpo.types import Item
from paco_judge.errors import UserError

EQUAL = {"train.reward_fn": '{"consistency_score": 2, "between_images": 2, "ocr": 0}'}
NEGATIVE = {"train.reward_fn": '{"consistency_score": -1}'}
ALL_ONE = '{"name": "log_tame_aggregate_fn", "arguments": {"reward_weights": null}}'
OWN = {"name": "log_tame_aggregate_fn", "arguments": {"reward_weights": {"a": 1, "b": 2.0}}}
OWN = {"train.aggregate_fn": json.dumps(OWN)}
SCORE = "train.reward_fn_kwargs.consistency_score"
JUDGE = {f"{SCORE}.host": "a", f"{SCORE}.model": "m", "datasets.a.folder": "x", "dataset": ""}
TURBO = {"test.num_steps": "8", "sample.guidance_scale": "0"}


@pytest.mark.parametrize(
    ("changes", "beginning"),
    [
        ({}, None),
        ({"sample.num_images_per_prompt": "1"}, "sample.num_images_per_prompt=1"),
        ({"train.reward_fn": '{"ocr": 1}'}, "test.reward_fn"),
        ({"train.reward_fn": '{"ocr": 1}', "test.reward_fn": ""}, None),
        ({"train.reward_fn": '{"paco_grpo.rewards.people:votes": 1}'}, None),
        ({"train.aggregate_fn": "log_tame_aggregate_fn"}, None),
        ({"train.aggregate_fn": "geometric_mean_aggregate_fn"}, "train.aggregate_fn="),
        ({"train.aggregate_fn": '{"name": "harmonic_mean_aggregate_fn"}'} | EQUAL, None),
        ({"train.aggregate_fn": "harmonic_mean_aggregate_fn"} | NEGATIVE, "train.aggregate_fn="),
        ({"train.aggregate_fn": ALL_ONE}, "train.aggregate_fn="),
        (OWN | {"train.reward_fn": '{"x:a": 1, "b": 2}', "test.reward_fn": ""}, None),
        (
            OWN | {"train.reward_fn": '{"x:a": 1, "b": 3}', "test.reward_fn": ""},
            "train.aggregate_fn=",
        ),
        (JUDGE | {"test.reward_fn_kwargs.consistency_score.question": "pair"}, "test.reward_fn_kw"),
        (
            JUDGE | {"datasets.a.reward_fn_kwargs.consistency_score.question": "pair"},
            "datasets.a.r",
        ),
        (JUDGE | {"test.reward_fn_kwargs.consistency_score.port": "81"}, None),
        (JUDGE | {"test.reward_fn_kwargs.consistency_score.model": "n"}, "test.reward_fn_kwargs"),
        ({f"{SCORE}.model": "m", "test.reward_fn_kwargs.consistency_score.model": "n"}, None),
        (
            {f"{SCORE}.model": "PaCo-Reward-7B", "test.reward_fn_kwargs.consistency_score.x": "y"},
            None,
        ),
        (JUDGE | {"test.reward_fn_kwargs.unused.port": "81"}, None),
        (TURBO, None),
        (TURBO | {"train.loss_type": "nft"}, "train.loss_type='nft'"),
        (TURBO | {"train.loss_type": "dgpo", "test.num_steps": "28"}, None),
    ],
)
def test_what_is_probably_not_meant_is_a_warning(tiny_flux_dir, changes, beginning):
    options = load_named("toy_t2is", ("pretrained.model", str(tiny_flux_dir)), *changes.items())
    lines = questionable(options, create_objective(options))
    assert len(lines) == (beginning is not None)
    assert all(line.startswith(beginning) for line in lines)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"train.lora_path": "{}"}, "config.train.lora_path: "),
        ({"train.loss_type": "opd", "train.opd_teachers.a": "{}"}, "adapter 'teacher_a': "),
    ],
)
def test_a_missing_adapter_is_named(tmp_path, changes, named):
    overrides = [(option, value.format(tmp_path)) for option, value in changes.items()]
    with pytest.raises(PolicyLoadError, match=named):
        check_adapters(load_named("t2is", *overrides))


def test_a_distilled_model_is_known_by_its_index(tiny_flux_dir, tmp_path):
    assert not is_step_distilled(tiny_flux_dir)
    for facts in ({"is_distilled": True}, {"_name_or_path": "Tongyi-MAI/Z-Image-Turbo"}):
        (tmp_path / "model_index.json").write_text(json.dumps(facts))
        assert is_step_distilled(tmp_path)


@pytest.mark.parametrize("name", ["kontext_editing", "ocr"])
def test_a_missing_public_set_names_its_download(name):
    options = load_named(name, ("dataset", f"/nowhere/{Path(load_named(name).dataset).name}"))
    with pytest.raises(UserError, match=r"fetch\.py (sharegpt-4o-image|ocr)"):
        load_prompts(options.dataset, "train", options.prompt_fn)


def test_prompt_set_must_suit_the_model(tiny_folder):
    several = Item(1, "x", references=("one", "two", "three"))
    for name, item, problem in (
        ("flux", Item(0, "x", references=("a picture",)), "text alone"),
        ("flux_kontext", Item(0, "x"), "geneval_image.*--image"),
        ("flux_kontext", several, "one image"),
        ("qwen_image_edit_plus", several, None),
    ):
        options = load_named("toy_t2is", ("pretrained.model", str(tiny_folder(name))))
        with pytest.raises(UserError, match=problem) if problem else contextlib.nullcontext():
            check_items(options, {"train": [item]})


@pytest.mark.parametrize("name", ["flux", "qwen_image_edit"])
def test_limits_of_a_model_are_known_without_its_weights(tiny_folder, name):
    folder = tiny_folder(name)
    policy = load(name, folder)
    fewest = fewest_steps(folder)
    assert len(policy.sigmas(fewest, 32, 32)) == fewest + 1
