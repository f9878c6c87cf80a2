"""Options from configuration files, the command line and saved runs."""

import shutil
import textwrap
from dataclasses import replace
from operator import attrgetter

import pytest
import yaml
from named import CONFIG, load

from paco_grpo.advantages.aggregation import describe, get_aggregate_fn
from paco_grpo.options import ConfigError, RunOptions, load_options, make_options, options_to_yaml
from paco_grpo.options.parse import parse_command_line


@pytest.fixture
def load_file(tmp_path):
    """Loads a configuration file that changes ``config``."""

    def load_lines(lines, *overrides):
        file = tmp_path / "my_config.py"
        body = textwrap.indent(textwrap.dedent(lines), "    ")
        file.write_text(
            "import numpy as np\nfrom paco_grpo.options import config_dict\n\n"
            f"def get_config(name=''):\n    config = config_dict()\n{body}\n    return config\n"
        )
        return load_options(str(file), overrides)

    return load_lines


def test_command_line_grammar():
    arguments = [
        "--config", "a.py:b", "--config.x=1", "-config.y.z", "2_3", "--noconfig.w", "--config.v=", "--config.u", "-1",
    ]  # fmt: skip
    pairs = [("x", "1"), ("y.z", "2_3"), ("w", "false"), ("v", ""), ("u", "-1")]
    assert parse_command_line(arguments) == ("a.py:b", pairs)
    for words in ("--confg=a", "--config=a train.x=1", "--config.x=1", "--config", ""):
        with pytest.raises(ConfigError):
            parse_command_line(words.split())


# Option → {text: value}.
VALUES = {
    "train.learning_rate": {"1e-3": 1e-3, "1": 1.0},
    "sample.noise_steps": {"1,2": (1, 2), "(3,)": (3,), "[0, 4]": (0, 4), " 2": (2,), "": ()},
    "max_train_minutes": {"2": 2.0, "": None},
    "train.ema": {"False": False, "no": False},
    "speed.compile": {"0": False},
    "run_name": {"none": "none"},
    "sample.negative_prompt": {" ": " ", "": None},
    "train.aggregate_fn": {"log_tame_aggregate_fn": "log_tame_aggregate_fn", "None": None},
    "train.lora_targets": {
        "attention": "attention",
        "to_q,ff.net.2": ("to_q", "ff.net.2"),
        "['to_q']": ("to_q",),
        "[to_k, to_q]": ("to_k", "to_q"),
        r"[a-z_]+\.\d{1,2}\.attn\.to_q": r"[a-z_]+\.\d{1,2}\.attn\.to_q",
    },
    "train.reward_fn": {"{'ocr': 2}": {"ocr": 2}, "ocr: 2": {"ocr": 2}, "": {}},
}


def test_values_take_the_type_of_the_option():
    for name, texts in VALUES.items():
        for text, value in texts.items():
            result = attrgetter(name)(load("toy_t2is", (name, text)))
            assert result == value and type(result) is type(value), name


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("train.learning_rate", "none", "train.learning_rate"),
        ("seed", "None", "seed"),
        ("train", "1", "train"),
        ("seed.x", "1", "seed"),
        ("train.reward_fn", "3", "train.reward_fn"),
        ("num_steps", "1", "num_steps.*config.sample.num_steps or config.test.num_steps"),
        ("model", "x", "model.*config.pretrained.model"),
    ],
)
def test_a_wrong_value_or_name_is_named(name, text, named):
    with pytest.raises(ConfigError, match=f"config.{named}"):
        load("toy_t2is", (name, text))


def test_tables_in_a_file(load_file):
    assert load_file("") == make_options({}) == RunOptions()
    options = load_file(
        """
        config.train.reward_fn = {"pkg.mod:factory": 1.0, "ocr": 1}
        config.train.reward_fn.ocr = 0.5
        config.train.reward_fn_kwargs = {"pkg.mod:factory": {"size": (1, 2), "nested": {"a.b": None}}}
        config.train.reward_fn_kwargs["ocr"] = {"server": "x", "scale": np.float64(0.5), "count": np.int64(2)}
        """,
        ("train.reward_fn.pkg.mod:factory", "2"),
        ("train.reward_fn_kwargs.pkg.mod:factory.size", "3"),
        ("test.reward_fn_kwargs.ocr.note", "it's [open"),
    )
    assert options.test.reward_fn_kwargs == {"ocr": {"note": "it's [open"}}
    assert options.train.reward_fn == {"pkg.mod:factory": 2, "ocr": 0.5}
    assert options.train.reward_fn_kwargs == {
        "pkg.mod:factory": {"size": 3, "nested": {"a.b": None}},
        "ocr": {"server": "x", "scale": 0.5, "count": 2},
    }
    assert make_options(yaml.safe_load(options_to_yaml(options))) == options


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (
            "config.train.reward_fn_kwargs = {'ocr': {'reader': print}}",
            "config.train.reward_fn_kwargs.ocr.reader",
        ),
        ("config.train.aggregate_fn = 3", "config.train.aggregate_fn=3"),
        (
            "config.train.learning_rat = 1",
            "config.train.learning_rat. Did you mean config.train.learning_rate",
        ),
        ("config.trian.beta = 1", "my_config.py: 'trian'.*\"train\""),
    ],
)
def test_wrong_line_of_a_file_names_the_option(load_file, line, named):
    with pytest.raises(ConfigError, match=named):
        load_file(line)


@pytest.mark.parametrize("source", ["nowhere.py:x", "empty.py", "grpo.py:toy_t2iss", "grpo.py"])
def test_unusable_source_is_named(source, tmp_path):
    (tmp_path / "empty.py").write_text("")
    folder = CONFIG if source.startswith("grpo") else tmp_path
    with pytest.raises(ConfigError, match=source.partition(":")[0]) as caught:
        load_options(f"{folder}/{source}")
    if source == "grpo.py:toy_t2iss":
        assert "'toy_t2is'" in str(caught.value)


def test_a_function_of_the_users_copy_is_a_named_configuration(tmp_path):
    for file in CONFIG.glob("*.py"):
        shutil.copy(file, tmp_path)
    with (tmp_path / "grpo.py").open("a") as file:
        file.write(
            "\n\ndef negated(**rewards):\n    return {k: -r for k, r in next(iter(rewards.values())).items()}\n"
        )
        file.write(
            "\n\ndef my_set():\n    config = t2is()\n    config.train.aggregate_fn = negated\n    return config\n"
        )
    saved = describe(
        load_options(f"{tmp_path}/grpo.py:my_set").train.aggregate_fn
    )  # as in a run's config.yaml
    assert saved == f"{tmp_path}/grpo.py:negated" and get_aggregate_fn(saved)(r={"a": 1}) == {
        "a": -1
    }
    assert load_options(f"{tmp_path}/grpo.py:t2is_24gb").pretrained.quantize == "nf4"
    for wrong in ("np", "did_you_mean", "_changed", "get_config", "my_sett"):
        with pytest.raises(ConfigError):
            load_options(f"{tmp_path}/grpo.py:{wrong}")


def test_a_saved_run_loads_to_equal_options(tmp_path):
    source = str(tmp_path / "config.yaml")
    for name in ("t2is_24gb", "toy_kontext"):
        options = load(
            name, ("sample.noise_steps", "1,3"), ("train.reward_fn.a.b:c", "2"), ("test.seed", "9")
        )
        (tmp_path / "config.yaml").write_text(options_to_yaml(options))
        assert load_options(source) == options
        assert load_options(source, [("test.seed", "None")]) == replace(
            options, test=replace(options.test, seed=None)
        )
    (tmp_path / "config.yaml").write_text("train: {reward_fn: }")
    assert load_options(source) == RunOptions()
    for text, named in (("- 3", "config"), ("train: {ema: maybe}", "config.train.ema")):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(ConfigError, match=named):
            load_options(source)
