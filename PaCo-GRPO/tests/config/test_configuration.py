"""Configurations are closed, typed, and come back the same from their file."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from named import CONFIG, NAMES, load, override

from paco_grpo.training.configuration import (
    ConfigError,
    apply_overrides,
    config_to_yaml,
    load_config,
    parse_command_line,
)


def test_unknown_name_lists_the_known_ones():
    known = ", ".join(sorted(NAMES))
    with pytest.raises(
        ConfigError, match=rf"unknown configuration 'toy_t2iss'. Did you mean 'toy_t2is'\? Known: {known}"
    ):
        load("toy_t2iss")


def test_missing_file_is_named():
    with pytest.raises(ConfigError, match="nowhere.py.*does not exist"):
        load_config("nowhere.py:x", CONFIG / "base.py")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("train.resoluton", "config.train.resolution"),
        ("train.learning_rte", "config.train.learning_rate"),
        ("sample.noise_step", "config.sample.noise_steps"),
        ("num_steps", "config.sample.num_steps or config.test.num_steps"),
        ("seeed", "config.seed"),
    ],
)
def test_unknown_key_names_the_nearest(key, nearest):
    with pytest.raises(ConfigError, match=rf"unknown option config.{key}. Did you mean {nearest}\?"):
        override((key, "1"))


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.learning_rate", "1e-3", 1e-3),
        ("train.learning_rate", "1", 1.0),
        ("sample.noise_steps", "1,2", (1, 2)),
        ("sample.noise_steps", "(3,)", (3,)),
        ("sample.noise_steps", "[0, 4]", (0, 4)),
        ("sample.noise_steps", "2", (2,)),
        ("sample.num_noise_steps", "None", None),
        ("sample.num_noise_steps", "2", 2),
        ("max_train_minutes", "2", 2.0),
        ("train.lora_path", "null", None),
        ("train.timesteps", "1", (1,)),
        ("sample.cps", "true", True),
        ("sample.cps", "False", False),
        ("run_name", "none", "none"),
        ("train.reward_fn", "{'jpeg_compressibility': 2}", {"jpeg_compressibility": 2}),
        ("test.reward_fn", "", {}),
    ],
)
def test_values_take_the_option_s_type(key, text, value):
    node = override((key, text))
    for part in key.split("."):
        node = node[part]
    assert (node.to_dict() if isinstance(value, dict) else node) == value


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("train.batch_size", "1.5", "an integer"),
        ("train.learning_rate", "fast", "a number"),
        ("sample.cps", "perhaps", "true or false"),
        ("sample.noise_steps", "one", "a list of integers"),
        ("seed", "None", "cannot be None"),
        ("train", "1", "is a group of options"),
        ("seed.x", "1", "has no field 'x'"),
        ("train.reward_fn", "3", "is not a table"),
        ("train.reward_fn_kwargs.consistency_score", "3", "KEYWORD"),
    ],
)
def test_wrong_values_are_refused(key, text, said):
    with pytest.raises(ConfigError, match=said):
        override((key, text))


def test_tables_take_names_with_dots():
    config = override(
        ("train.reward_fn.my.module:factory", "0.5"),
        ("train.reward_fn_kwargs.my.module:factory.scale", "3"),
        ("train.reward_fn_kwargs.consistency_score.base_url", "http://127.0.0.1:9000"),
    )
    assert config.train.reward_fn.to_dict() == {
        "consistency_score": 1.0,
        "paco_toy.oracle:oracle_consistency": 0.0,
        "my.module:factory": 0.5,
    }
    assert config.train.reward_fn_kwargs["my.module:factory"].to_dict() == {"scale": 3}
    kwargs = config.train.reward_fn_kwargs["consistency_score"].to_dict()
    assert kwargs == {"base_url": "http://127.0.0.1:9000", "model": "PaCo-Reward-Toy"}


def test_command_line():
    arguments = ["--config", "a.py:b", "--config.x=1", "--config.y.z", "2 3", "--noconfig.w", "--config.v="]
    assert parse_command_line(arguments) == ("a.py:b", [("x", "1"), ("y.z", "2 3"), ("w", "false"), ("v", "")])
    for wrong, said in (
        (["--confg=a"], "unknown argument"),
        (["--config.x=1"], "no configuration"),
        (["--config"], "no value"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse_command_line(wrong)


@pytest.mark.parametrize("name", NAMES)
def test_saved_configuration_comes_back_the_same(name, tmp_path):
    config = override(("sample.noise_steps", "1,3"), ("train.reward_fn.a.b:c", "2"), ("test.seed", "9"), name=name)
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    again = load_config(str(tmp_path / "config.yaml"), CONFIG / "base.py")
    assert again.to_dict() == config.to_dict()
    apply_overrides(again, [("sample.num_noise_steps", "1"), ("test.seed", "None")])


def test_saved_configuration_with_an_unknown_key_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text("train: {resoluton: 64}")
    with pytest.raises(ConfigError, match="Did you mean config.train.resolution"):
        load_config(str(tmp_path / "config.yaml"), CONFIG / "base.py")


@given(st.floats(allow_nan=False, allow_infinity=False), st.lists(st.integers(-9, 99), max_size=5))
def test_numbers_survive_the_command_line(number, steps):
    config = override(("train.learning_rate", repr(number)), ("sample.noise_steps", repr(tuple(steps))))
    assert config.train.learning_rate == number
    assert config.sample.noise_steps == tuple(steps)
