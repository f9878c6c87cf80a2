"""Ranges and contradictions are reported before any model is loaded, all at once, by the name of the option."""

import math
from dataclasses import replace

import pytest
from named import NAMES, load

from paco_grpo.options import OPTIONS, ConfigError, find_problems, make_options, refuse

GOOD = [("dataset", "prompts"), ("train.reward_fn", "{'jpeg_compressibility': 1}")]
LIMITS = {name: o for name, o in OPTIONS.items() if {o.at_least, o.at_most, o.above, o.below} != {None}}


def problems_of(*overrides):
    """The options named by the problems that the overrides cause."""
    lines = find_problems(make_options({}, [*GOOD, *overrides]))
    return [line.partition(" ")[0].partition("=")[0] for line in lines]


@pytest.mark.parametrize("name", NAMES)
def test_named_configurations_pass(name):
    assert find_problems(load(name)) == []


@pytest.mark.parametrize("name", LIMITS)
def test_limits(name):
    option, step = LIMITS[name], 1e-6 if LIMITS[name].kind is float else 1
    others = [("sample.noise_steps", "0"), ("sample.num_steps", "9")] if name != "sample.num_steps" else []

    def is_refused(value):
        return name in problems_of(*others, (name, repr(option.kind(value))))

    for bound, to_inside, to_outside in (
        (option.at_least, 0, -step),
        (option.at_most, 0, step),
        (option.above, step, 0),
        (option.below, -step, 0),
    ):
        assert bound is None or not is_refused(bound + to_inside) and is_refused(bound + to_outside)
    if option.kind is float:
        assert is_refused(math.nan) and is_refused(math.inf)


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.choices])
def test_choices(name):
    for choice in OPTIONS[name].choices:
        assert name not in problems_of((name, str(choice)))
    assert name in problems_of((name, "7"))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"sample.noise_steps": "1,10"}, "sample.noise_steps"),
        ({"sample.noise_steps": "1,9"}, None),
        ({"sample.noise_steps": "-1"}, "sample.noise_steps"),
        ({"sample.noise_steps": "0"}, None),
        ({"sample.noise_steps": "1,1"}, "sample.noise_steps"),
        ({"sample.num_noise_steps": "2"}, "sample.num_noise_steps"),
        ({"sample.num_noise_steps": "2", "sample.noise_steps": "1,2"}, None),
        ({"train.timesteps": "()"}, "train.timesteps"),
        ({"train.timesteps": "1"}, None),
        ({"sample.tail_order": "2"}, None),
        ({"sample.tail_order": "2", "sample.noise_steps": ""}, "sample.tail_order"),
        ({"sample.noise_steps": ""}, None),
        ({"sample.tail_cache": "0.1", "speed.compile": "1"}, "sample.tail_cache"),
        ({"sample.tail_cache": "0.1"}, None),
        ({"sample.tail_weights": "int8", "speed.compile": "1"}, "sample.tail_weights"),
        ({"sample.tail_weights": "int8", "pretrained.quantize": "nf4"}, "sample.tail_weights"),
        ({"sample.tail_weights": "int8"}, None),
        ({"speed.fused_adam": "1", "train.use_8bit_adam": "1"}, "speed.fused_adam"),
        ({"train.use_8bit_adam": "1"}, None),
        ({"speed.fused_adam": "1"}, None),
        ({"use_lora": "0", "train.beta": "0.1"}, "use_lora"),
        ({"use_lora": "0", "train.lora_path": "x"}, "train.lora_path"),
        ({"use_lora": "0"}, None),
        ({"train.beta": "0.1", "train.lora_path": "x"}, None),
        ({"pretrained.quantize": "nf4", "use_lora": "0"}, "pretrained.quantize"),
        ({"pretrained.quantize": "int8", "sample.merge_lora": "1"}, "sample.merge_lora"),
        ({"pretrained.quantize": "nf4", "train.sharding": "fsdp2"}, "train.sharding"),
        ({"pretrained.quantize": "nf4", "speed.compile": "1"}, "speed.compile"),
        ({"sample.merge_lora": "1", "train.sharding": "fsdp2"}, None),
        ({"dataset": ""}, "dataset"),
        ({"train.reward_fn": ""}, "train.reward_fn"),
        ({"train.reward_fn.ocr": "nan"}, "train.reward_fn.ocr"),
        ({"test.reward_fn.ocr": "much"}, "test.reward_fn.ocr"),
        ({"test.reward_fn.ocr": "True"}, "test.reward_fn.ocr"),
        ({"test.reward_fn.ocr": "0"}, None),
        ({"train.reward_fn_kwargs.ocr.server": "x"}, "train.reward_fn_kwargs"),
        ({"test.reward_fn_kwargs.ocr.server": "x"}, "test.reward_fn_kwargs"),
        ({"train.reward_fn_kwargs.ocr.server": "x", "test.reward_fn.ocr": "1"}, None),
        ({"train.aggregate_fn_kwargs.reward_weights": "{'ocr': 1}"}, "train.aggregate_fn_kwargs.reward_weights"),
        ({"train.aggregate_fn_kwargs.reward_weights": "{'f': 1}", "train.reward_fn.m:f": "1"}, None),
        ({"train.aggregate_fn_kwargs.threshold": "1"}, None),
    ],
)
def test_contradictions(overrides, named):
    assert problems_of(*overrides.items()) == ([named] if named else [])


def test_every_tail_option_needs_noise():
    tail = {
        "sample.tail_steps": "1",
        "sample.tail_order": "2",
        "sample.tail_cache": "0.1",
        "sample.tail_weights": "int8",
    }
    assert problems_of(*tail.items()) == []
    assert problems_of(*tail.items(), ("sample.noise_level", "0")) == list(tail)


def test_all_problems_are_reported_at_once():
    options = make_options({}, [("train.batch_size", "0"), ("sample.noise_steps", "77")])
    with pytest.raises(ConfigError) as caught:
        refuse(find_problems(options))
    lines = str(caught.value).splitlines()
    assert len(lines) == 4  # also: no data set, no reward
    assert all(line.startswith("config.") for line in lines)
    refuse(find_problems(make_options({}, GOOD)))


def test_misspelt_names_are_corrected():
    wrong = make_options(
        {}, [*GOOD, ("train.old_log_prob", "rolout"), ("train.reward_fn_kwargs.jpeg.x", "1"),
             ("train.aggregate_fn_kwargs.reward_weights", "{'jpeg_compress': 1}")]
    )  # fmt: skip
    found = "\n".join(find_problems(wrong))
    assert found.count("Did you mean 'jpeg_compressibility'") == 2 and "Did you mean 'rollout'" in found
    quiet = replace(wrong, train=make_options({}, GOOD).train)
    assert find_problems(quiet) == []
