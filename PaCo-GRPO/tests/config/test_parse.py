"""Options from configuration files, the command line and saved runs."""

import shutil
import textwrap
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import yaml
from named import CONFIG, NAMES, load

from paco_grpo.advantages.aggregation import describe, get_aggregate_fn
from paco_grpo.options import (
    OPTIONS,
    ConfigError,
    RunOptions,
    config_dict,
    load_options,
    make_options,
    options_to_dict,
    options_to_yaml,
)
from paco_grpo.options.parse import parse_command_line


def value_of(options, name):
    for part in name.split("."):
        options = getattr(options, part)
    return options


def described(options):
    """As a run saves them."""
    return replace(options, train=replace(options.train, aggregate_fn=describe(options.train.aggregate_fn)))


@pytest.fixture
def load_file(tmp_path):
    """Loads a configuration file that changes ``config``, the options with their defaults."""

    def load_lines(lines, *overrides):
        file = tmp_path / "my_config.py"
        body = textwrap.indent(textwrap.dedent(lines), "    ")
        file.write_text(
            "import numpy as np\nfrom paco_grpo.advantages.aggregation import *\nfrom paco_grpo.options import config_dict\n\n"
            "def doubled(**rewards):\n    return {key: 2 * values for key, values in next(iter(rewards.values())).items()}\n\n"
            f"def get_config(name=''):\n    config = config_dict()\n{body}\n    return config\n"
        )
        return load_options(str(file), overrides)

    return load_lines


# --- the command line -------------------------------------------------------------------------------------------------


def test_command_line_grammar():
    arguments = [
        "--config", "a.py:b", "--config.x=1", "-config.y.z", "2_3", "--noconfig.w", "--config.v=", "--config.u", "-1",
    ]  # fmt: skip
    pairs = [("x", "1"), ("y.z", "2_3"), ("w", "false"), ("v", ""), ("u", "-1")]
    assert parse_command_line(arguments) == ("a.py:b", pairs)


@pytest.mark.parametrize(
    "words",
    ["--confg=a", "--config=a train.x=1", "--config.x=1", "--config", ""],
)
def test_malformed_command_line_is_refused(words):
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


@pytest.mark.parametrize("name", VALUES)
def test_values_take_the_type_of_the_option(name):
    for text, value in VALUES[name].items():
        result = value_of(load("toy_t2is", (name, text)), name)
        assert result == value and type(result) is type(value)


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("train.learning_rate", ["fast", "none"]),
        ("sample.cps", ["perhaps"]),
        ("seed", ["None"]),
        ("train", ["1"]),
        ("seed.x", ["1"]),
        ("train.reward_fn", ["3"]),
    ],
)
def test_wrong_value_names_the_option(name, texts):
    for text in texts:
        with pytest.raises(ConfigError, match=f"^config.{name.removesuffix('.x')}\\b"):
            load("toy_t2is", (name, text))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("train.resoluton", "config.train.resolution"),
        ("train.learning_rat", "config.train.learning_rate"),
        ("num_steps", "config.sample.num_steps or config.test.num_steps"),
        ("zzz", "docs/configuration.md"),
    ],
)
def test_unknown_option_names_the_nearest(name, meant):
    with pytest.raises(ConfigError, match=f"config.{name}.*{meant}"):
        load("toy_t2is", (name, "1"))


def test_one_entry_of_a_table():
    options = load(
        "toy_t2is",
        ("train.reward_fn.my.module:factory", "0.5"),
        ("train.reward_fn_kwargs.my.module:factory.scale", "3"),
        ("train.reward_fn_kwargs.consistency_score.base_url", "http://127.0.0.1:9000"),
        ("train.reward_fn_kwargs.consistency_score.headers", "{'a': 1}"),
        ("train.reward_fn_kwargs.a.b:c", "{'scale': (1, 2)}"),
        ("train.aggregate_fn_kwargs.threshold", "0.5"),
        ("test.reward_fn.jpeg_compressibility", "1"),
        ("test.reward_fn_kwargs.ocr.note", "it's [open"),
    )
    assert options.train.reward_fn["my.module:factory"] == 0.5
    assert {"consistency_score", "between_images"} < set(options.train.reward_fn)
    assert options.train.reward_fn_kwargs == {
        "consistency_score": {"base_url": "http://127.0.0.1:9000", "model": "PaCo-Reward-Toy", "headers": {"a": 1}},
        "between_images": {"model": "PaCo-Reward-Toy"},
        "my.module:factory": {"scale": 3},
        "a.b:c": {"scale": [1, 2]},
    }
    assert options.train.aggregate_fn_kwargs == {"threshold": 0.5}
    assert options.test.reward_fn["jpeg_compressibility"] == 1
    assert options.test.reward_fn_kwargs == {"ocr": {"note": "it's [open"}}


# --- configuration files ----------------------------------------------------------------------------------------------


def test_a_file_that_changes_nothing_has_the_defaults(load_file):
    assert load_file("") == make_options({}) == RunOptions()
    assert {name: value_of(RunOptions(), name) for name in OPTIONS} == {n: o.get_default(call_default_factory=True) for n, o in OPTIONS.items()}


def test_tables_in_a_file(load_file):
    options = load_file(
        """
        config.train.reward_fn = {"pkg.mod:factory": 1.0, "ocr": 1}
        config.train.reward_fn.ocr = 0.5
        config.train.reward_fn_kwargs = {"pkg.mod:factory": {"size": (1, 2), "nested": {"a.b": None}}}
        config.train.reward_fn_kwargs["ocr"] = {"server": "x", "scale": np.float64(0.5), "count": np.int64(2)}
        """,
        ("train.reward_fn.pkg.mod:factory", "2"),
        ("train.reward_fn_kwargs.pkg.mod:factory.size", "3"),
    )
    assert options.train.reward_fn == {"pkg.mod:factory": 2, "ocr": 0.5}
    assert options.train.reward_fn_kwargs == {
        "pkg.mod:factory": {"size": 3, "nested": {"a.b": None}},
        "ocr": {"server": "x", "scale": 0.5, "count": 2},
    }
    assert all(type(table) is dict for table in (options.train.reward_fn, options.train.reward_fn_kwargs["ocr"]))
    assert make_options(yaml.safe_load(options_to_yaml(options))) == options


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("config.train.resoluton = 64", "config.train.resoluton.*config.train.resolution"),
        ("config.train.learning_rate = 'fast'", "config.train.learning_rate='fast'"),
        ("config.seed = None", "config.seed"),
        ("config.sample.noise_steps = [-1]", "config.sample.noise_steps"),
        ("config.train = 3", "config.train"),
        ("config.train.reward_fn_kwargs = {'ocr': {'reader': print}}", "config.train.reward_fn_kwargs.ocr.reader"),
        ("config.train.aggregate_fn = 3", "config.train.aggregate_fn=3"),
    ],
)
def test_wrong_line_of_a_file_names_the_option(load_file, line, named):
    with pytest.raises(ConfigError, match=named):
        load_file(line)


@pytest.mark.parametrize("source", ["nowhere.py:x", "base.txt", "empty.py", "grpo.py:toy_t2iss", "grpo.py"])
def test_unusable_source_is_named(source, tmp_path):
    for name in ("base.txt", "empty.py"):
        (tmp_path / name).write_text("")
    folder = CONFIG if source.startswith("grpo") else tmp_path
    with pytest.raises(ConfigError, match=source.partition(":")[0]) as caught:
        load_options(f"{folder}/{source}")
    if source == "grpo.py:toy_t2iss":
        assert "'toy_t2is'" in str(caught.value) and "_flow_dppo" in str(caught.value)


def test_a_function_of_the_users_copy_is_a_named_configuration(tmp_path):
    for file in CONFIG.glob("*.py"):
        shutil.copy(file, tmp_path)
    with (tmp_path / "grpo.py").open("a") as file:
        file.write("\n\ndef my_set() -> ConfigDict:\n    config = t2is()\n    config.seed = 7\n    return config\n")
    assert load_options(f"{tmp_path}/grpo.py:my_set").seed == 7
    assert load_options(f"{tmp_path}/grpo.py:t2is_24gb").pretrained.quantize == "nf4"
    for wrong in ("np", "did_you_mean", "_changed", "get_config", "my_sett"):
        with pytest.raises(ConfigError):
            load_options(f"{tmp_path}/grpo.py:{wrong}")


def test_options_do_not_change_after_parsing():
    options, again = RunOptions(), RunOptions()
    with pytest.raises(FrozenInstanceError):
        options.train.resolution = 64
    options.train.reward_fn["x"] = 1.0
    assert again.train.reward_fn == make_options({}).train.reward_fn == {}
    config_dict().train.reward_fn["x"] = 1.0
    assert config_dict().train.reward_fn.to_dict() == {}


# --- aggregations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        "geometric_mean_aggregate_fn",
        "doubled",
        "log_tame_aggregate_fn(threshold=0.5)",
        "weighted_advantage_sum_aggregate_fn(reward_weights=config.train.reward_fn, global_std=True)",
    ],
)
def test_aggregation_survives_saving(load_file, function):
    options = load_file(f"config.train.reward_fn = {{'a': 1.0}}\nconfig.train.aggregate_fn = {function}")
    saved = options_to_yaml(described(options))
    again = make_options(yaml.safe_load(saved))
    assert options_to_yaml(again) == saved
    if callable(options.train.aggregate_fn):
        rewards = {"a": {"p": np.array([1.0, 2.0, 4.0]), "q": np.array([0.0, 5.0, 1.0])}}
        first, second = (get_aggregate_fn(o.train.aggregate_fn, {"a": 1.0})(**rewards) for o in (options, again))
        assert {k: v.tolist() for k, v in first.items()} == {k: v.tolist() for k, v in second.items()}


def test_a_function_must_be_described_to_be_saved(load_file):
    with pytest.raises(ConfigError, match=r"config\.train\.aggregate_fn"):
        options_to_dict(load_file("config.train.aggregate_fn = doubled"))


# --- saved runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_run_loads_to_equal_options(name, tmp_path):
    options = load(name, ("sample.noise_steps", "1,3"), ("train.reward_fn.a.b:c", "2"), ("test.seed", "9"))
    (tmp_path / "config.yaml").write_text(options_to_yaml(options))
    source = str(tmp_path / "config.yaml")
    assert load_options(source) == options
    assert load_options(source, [("test.seed", "None")]) == replace(options, test=replace(options.test, seed=None))


@pytest.mark.parametrize(("text", "named"), [("- 3", "config"), ("train: {ema: maybe}", "config.train.ema"), ("train: {emma: 1}", "config.train.ema")])
def test_wrong_saved_run_names_the_option(text, named, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=named):
        load_options(str(tmp_path / "config.yaml"))


@pytest.mark.parametrize("text", ["", "train: {reward_fn: }"])
def test_an_empty_saved_run_has_the_defaults(text, tmp_path):
    (tmp_path / "config.yml").write_text(text)
    assert load_options(str(tmp_path / "config.yml")) == RunOptions()
