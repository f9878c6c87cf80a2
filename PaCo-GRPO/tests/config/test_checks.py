"""Ranges and contradictions are reported before any model is loaded, all at once, by the name of
the option.
"""

import pytest
from named import NAMES, load

from paco_grpo.objectives import get_objective
from paco_grpo.options import make_options
from paco_grpo.training.checks import contradictions

GOOD = [("dataset", "prompts"), ("train.reward_fn", "{'jpeg_compressibility': 1}")]


def problems_of(*overrides):
    lines = contradictions(make_options({}, [*GOOD, *overrides]))
    return [line.partition(" ")[0].partition("=")[0] for line in lines]


def test_named_configurations_pass():
    combined = ["t2is_24gb_nft", "klein_t2is_awm", "sd3_ocr_dgpo", "klein_t2is_flow_dppo"]
    combined += ["klein_editing_dpo", "qwen_editing_crd", "z_image_t2is_opd"]
    for name in [*NAMES, *combined, "flux2_t2is_80gb"]:
        options = load(name, ("train.opd_teachers.one", "ADAPTER"))
        assert [
            *contradictions(options),
            *get_objective(options.train.loss_type).check(options),
        ] == [], name


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"sample.noise_steps": "1,10"}, "sample.noise_steps"),
        ({"sample.num_noise_steps": "2"}, "sample.num_noise_steps"),
        ({"sample.window_epochs": "3"}, "sample.window_epochs"),
        ({"sample.transition": "cps", "sample.noise_steps": "8,9"}, "sample.transition"),
        ({"sample.transition": "cps", "sample.noise_level": "1.1"}, "sample.noise_level"),
        (
            {"sample.transition": "cps", "sample.noise_steps": "8", "sample.noise_level": "1"},
            None,
        ),
        ({"sample.transition": "cps", "sample.noise_level": "0"}, None),
        ({"sample.transition": "dance_sde", "sample.noise_steps": "0,9"}, None),
        ({"sample.transition": "csp"}, "sample.transition"),
        ({"train.reference": "start"}, "train.reference"),
        (
            {"sample.latents_per_prompt": "3", "sample.same_latent": "1"},
            "sample.latents_per_prompt",
        ),
        ({"use_lora": "0", "train.beta": "0.1"}, "use_lora"),
        ({"use_lora": "0", "train.lora_path": "x"}, "train.lora_path"),
        ({"use_lora": "0", "pretrained.quantize": "nf4"}, "pretrained.quantize"),
        ({"train.timesteps": "()"}, "train.timesteps"),
        ({"dataset": ""}, "dataset"),
        ({"resume_from": "latest"}, "resume_from"),
        ({"resume_from": "latest", "run_name": "first"}, None),
        ({"train.reward_fn": ""}, "train.reward_fn"),
        # Arguments of a reward that is replaced, or of a misspelt one.
        ({"train.reward_fn_kwargs.ocr.server": "x"}, None),
        ({"test.reward_fn_kwargs.my.rewards:brightness.scale": "2"}, None),
        ({"train.reward_fn_kwargs.judge.server": "x"}, "train.reward_fn_kwargs"),
        ({"test.reward_fn_kwargs.jpeg_incompressibility.server": "x"}, None),
        ({"test.reward_fn_kwargs.jpeg_compresibility.server": "x"}, "test.reward_fn_kwargs"),
    ],
)
def test_contradictions(overrides, named):
    assert problems_of(*overrides.items()) == ([named] if named else [])
