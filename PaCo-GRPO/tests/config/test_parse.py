"""Options from configuration files, the command line and saved runs."""

import logging
import shutil
import textwrap
from dataclasses import replace
from operator import attrgetter

import pytest
import yaml
from named import CONFIG, load

from paco_grpo.advantages.aggregation import describe, get_aggregate_fn
from paco_grpo.options import ConfigError, RunOptions, load_options, make_options, options_to_yaml
from paco_grpo.options.literals import read_yaml
from paco_grpo.options.parse import parse_command_line
from paco_grpo.options.published import PUBLISHED
from paco_grpo.training.checks import contradictions


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
        "--config",
        "a.py:b",
        "--config.x=1",
        "-config.y.z",
        "2_3",
        "--noconfig.w",
        "--config.v=",
        "--config.u",
        "-1",
    ]
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
        kwargs = {"pkg.mod:factory": {"size": (1, 2), "nested": {"a.b": None}}}
        kwargs["ocr"] = {"server": "x", "scale": np.float64(0.5), "count": np.int64(2)}
        config.train.reward_fn_kwargs = kwargs
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
    ("text", "value"),
    [("010", 10), ("1e-3", 0.001), ("1:30", "1:30"), ("2026-01-02", "2026-01-02"), ("no", False)],
)
def test_numbers_are_those_that_a_person_reads(tmp_path, text, value):
    """YAML 1.1 reads 8, a text, 90, a date and False; so do saved runs and the command line."""
    (tmp_path / "config.yaml").write_text(f"train: {{reward_fn_kwargs: {{ocr: {{x: {text}}}}}}}")
    in_file = load_options(str(tmp_path / "config.yaml"))
    on_command_line = make_options({}, [("train.reward_fn_kwargs.ocr.x", text)])
    assert in_file.train.reward_fn_kwargs == {"ocr": {"x": value}}
    assert on_command_line.train.reward_fn_kwargs == in_file.train.reward_fn_kwargs


@pytest.mark.parametrize("text", ["010", "1e-3", "1:30", "2026-01-02", "no", "0x10", "1_0", ".5"])
def test_a_saved_text_stays_a_text(text):
    options = make_options({"run_name": text, "train": {"reward_fn_kwargs": {"a": {"x": text}}}})
    assert make_options(read_yaml(options_to_yaml(options))) == options
    assert yaml.safe_load(options_to_yaml(options))["run_name"] == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("num_epochs", "True"),
        ("train.learning_rate", "True"),
        ("train.decay_type", "True"),
        ("sample.noise_steps", "True"),
        ("train.reward_fn.ocr", "True"),
        ("seed", "1:30"),
        ("sample.num_images_per_prompt", "2000000000"),
        ("test.num_steps", "2000000000"),
        ("train.lora_rank", "2000000000"),
    ],
)
def test_what_is_no_number_or_too_large_is_refused(name, text):
    with pytest.raises(ConfigError, match=f"config.{name}="):
        make_options({}, [(name, text)])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.reward_fn", "{'ocr': 1, 'ocr': 2}"),
        ("train.reward_fn", "{ocr: 1, ocr: 2}"),
        ("train.reward_fn_kwargs.ocr", "{'a': {'b': 1, 'b': 2}}"),
        ("train.aggregate_fn", "{'name': 'a', 'name': 'b'}"),
    ],
)
def test_a_key_that_is_given_twice_is_refused(name, text):
    with pytest.raises(ConfigError, match=f"config.{name}: .* is given twice"):
        make_options({}, [(name, text)])


def test_a_key_that_a_saved_run_gives_twice_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 1\ntrain: {beta: 1, beta: 2}\n")
    with pytest.raises(ConfigError, match=r"config.yaml cannot be read: 'beta' is given twice"):
        load_options(str(tmp_path / "config.yaml"))


@pytest.mark.parametrize("split", ["train", "test"])
def test_entries_of_a_table_that_was_emptied_before(split):
    table = f"{split}.reward_fn_kwargs"
    for first in ((table, ""), (table, "None"), (f"{table}.ocr", ""), (f"{table}.ocr", "None")):
        options = make_options({}, [first, (f"{table}.ocr.x", "1")])
        assert getattr(options, split).reward_fn_kwargs == {"ocr": {"x": 1}}
    options = make_options({split: None}, [(f"{table}.ocr.x", "1")])
    assert getattr(options, split).reward_fn_kwargs == {"ocr": {"x": 1}}
    for name in (table, f"{table}.ocr", f"{split}.reward_fn"):
        with pytest.raises(ConfigError, match=f"config.{name}=3 is a value"):
            make_options({}, [(name, "3"), (f"{name}.a.x", "1")])
    with pytest.raises(ConfigError, match=f"config.{split}=3 is a value"):
        make_options({split: 3}, [(f"{table}.ocr.x", "1")])


def test_arguments_of_a_replaced_reward_are_dropped(caplog):
    caplog.set_level(logging.INFO)
    mine = ("train.reward_fn", "{'my_rewards:brightness': 1.0}")
    options = load("t2is", mine)
    assert options.train.reward_fn_kwargs == {} and contradictions(options) == []
    assert "consistency_score was replaced" in caplog.text
    # Added beside the judge, whose arguments stay.
    beside = load("t2is", ("train.reward_fn.my_rewards:brightness", "0.5"))
    assert beside.train.reward_fn["consistency_score"] == 0.2
    assert beside.train.reward_fn_kwargs == load("t2is").train.reward_fn_kwargs
    # Still a reward of the evaluation.
    kept = load("t2is", mine, ("test.reward_fn", "{'consistency_score': 1}"))
    assert kept.train.reward_fn_kwargs == load("t2is").train.reward_fn_kwargs
    # Given on the command line, or misspelt in the file: no replaced reward's arguments.
    for given in ("consistency_score", "consistency_scor"):
        options = load("t2is", mine, (f"train.reward_fn_kwargs.{given}.port", "8001"))
        (problem,) = contradictions(options)
        assert f"has '{given}', which is not a reward of this run" in problem
    values = {"train": {"reward_fn": {"ocr": 1}, "reward_fn_kwargs": {"ocrr": {}}}, "dataset": "x"}
    (problem,) = contradictions(make_options(values, [("train.reward_fn", "{'ocr': 2}")]))
    assert "'ocrr'" in problem


def test_published_names_are_answered_with_what_they_are_here():
    for name in PUBLISHED:
        with pytest.raises(ConfigError) as caught:
            make_options({}, [(name, "1")])
        assert PUBLISHED[name] in str(caught.value) and "Did you mean" not in str(caught.value)
    with pytest.raises(ConfigError, match="geneval_image or arrow_editing$"):
        make_options({}, [("prompt_fn", "general_editing")])


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


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere.py:x", "nowhere.py does not exist"),
        ("nowhere.yaml", "nowhere.yaml does not exist"),
        ("notes.txt", "notes.txt' is not a .py or .yaml file"),
    ],
)
def test_a_file_that_does_not_exist_is_told_from_one_of_another_kind(name, problem, tmp_path):
    with pytest.raises(ConfigError, match=problem):
        load_options(f"{tmp_path}/{name}")


def test_suffixes_need_an_import(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(CONFIG.parent)
    file = tmp_path / "own.py"
    body = "\n\ndef mine():\n    return t2is()\n"
    file.write_text(f"from config.grpo import SUFFIXES, t2is{body}")
    assert load_options(f"{file}:mine_24gb_nft").train.loss_type == "nft"
    file.write_text(f"from config.grpo import t2is{body}")
    with pytest.raises(ConfigError, match="import SUFFIXES from config.grpo"):
        load_options(f"{file}:mine_nft")


OWN_CONFIGURATION = """

def negated(**rewards):
    return {k: -r for k, r in next(iter(rewards.values())).items()}


def my_set():
    config = t2is()
    config.train.aggregate_fn = negated
    return config
"""


def test_a_function_of_the_users_copy_is_a_named_configuration(tmp_path):
    for file in CONFIG.glob("*.py"):
        shutil.copy(file, tmp_path)
    with (tmp_path / "grpo.py").open("a") as file:
        file.write(OWN_CONFIGURATION)
    # As in a run's config.yaml.
    saved = describe(load_options(f"{tmp_path}/grpo.py:my_set").train.aggregate_fn)
    assert saved == f"{tmp_path}/grpo.py:negated"
    assert get_aggregate_fn(saved)(r={"a": 1}) == {"a": -1}
    assert load_options(f"{tmp_path}/grpo.py:t2is_24gb").pretrained.quantize == "nf4"
    for wrong in ("np", "config_dict", "_MODULE", "get_config", "negated", "for_24gb", "my_sett"):
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
    for text, named in (
        ("- 3", "config"),
        ("train: {ema: maybe}", "config.yaml: config.train.ema"),
        ("train: {emma: 1}", "config.yaml: unknown option config.train.emma"),
        ("logdir: x", "config.yaml: config.logdir is an option of the published code"),
    ):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(ConfigError, match=named):
            load_options(source)


def test_none_in_older_files_means_the_default():
    older = {"train": {"decay_type": None}, "sample": {"reward_batch_size": None}}
    options = make_options(older)
    assert options.train.decay_type == 1
    assert options.sample.reward_batch_size == 8
