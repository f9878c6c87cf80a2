"""Options from configuration files, the command line and saved runs."""

import shutil
import textwrap
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
from named import CONFIG, load

from paco_grpo.advantages.aggregation import describe, get_aggregate_fn
from paco_grpo.options import (
    ConfigError,
    RunOptions,
    load_options,
    make_options,
    options_to_yaml,
    read_options,
)


@pytest.fixture
def load_file(tmp_path):
    """Loads a configuration file that changes ``config``."""

    def load_lines(lines, *overrides):
        file = tmp_path / "my_config.py"
        body = textwrap.indent(textwrap.dedent(lines), "    ")
        file.write_text(
            "from paco_grpo.options import config_dict\n\n"
            f"def mine():\n    config = config_dict()\n{body}\n    return config\n"
        )
        return load_options(f"{file}:mine", overrides)

    return load_lines


def test_command_line_grammar():
    source = f"{CONFIG}/grpo.py:ocr_nft"
    changes = ["--config.seed=3", "--config.run_name=x=y", "--config.train.max_grad_norm="]
    for first in ([f"--config={source}"], ["--config", source]):
        options, name = read_options([*first, *changes[:2]])
        assert (options.seed, options.run_name, name) == (3, "x=y", "ocr_nft")
        with pytest.raises(ConfigError, match="max_grad_norm=''"):
            read_options([*first, *changes])
    for words in (
        "--confg=a",
        "--config=a train.x=1",
        "--config=a --config.seed 1",
        "--config",
        "",
    ):
        with pytest.raises(ConfigError, match="--config"):
            read_options(words.split())


# Option → {text: value}.
VALUES = {
    "train.learning_rate": {"1e-3": 1e-3, "1": 1.0},
    "sample.noise_steps": {"1,2": (1, 2), "(3,)": (3,), "[0, 4]": (0, 4), " 2": (2,), "": ()},
    "train.timesteps": {"2,0": (2, 0), "None": None},
    "train.decay_type": {"2": 2},
    "max_train_minutes": {"2": 2.0, "": None},
    "train.ema": {"False": False, "no": False},
    "speed.compile": {"0": False},
    "run_name": {"none": "none", "1e-3": "1e-3", "no": "no"},
    "pretrained.model": {"~/flux": f"{Path.home()}/flux", "~a/b~": "~a/b~"},
    "train.lora_path": {"~/l": f"{Path.home()}/l", "None": None},
    "resume_from": {"~/r": f"{Path.home()}/r", "latest": "latest"},
    "dataset": {"~": str(Path.home()), "": ""},
    "save_dir": {"~/s": f"{Path.home()}/s"},
    "sample.negative_prompt": {" ": " ", "": None},
    "train.aggregate_fn": {
        "log_tame_aggregate_fn": "log_tame_aggregate_fn",
        "None": None,
        '{"name": "a", "arguments": {"x": 1e-3}}': {"name": "a", "arguments": {"x": 1e-3}},
    },
    "train.lora_targets": {
        "attention": "attention",
        "to_q,ff.net.2": ("to_q", "ff.net.2"),
        "['to_q']": ("to_q",),
        "[to_k, to_q]": ("to_k", "to_q"),
        r"[a-z_]+\.\d{1,2}\.attn\.to_q": r"[a-z_]+\.\d{1,2}\.attn\.to_q",
    },
    "train.reward_fn": {"{'a.b:c': 2}": {"a.b:c": 2}, '{"ocr": 2}': {"ocr": 2}, "": {}, "None": {}},
}


@pytest.mark.parametrize("name", VALUES)
def test_values_take_the_type_of_the_option(name):
    for text, value in VALUES[name].items():
        options = load("toy_t2is", (name, text))
        result = attrgetter(name)(options)
        assert result == value and type(result) is type(value)
        saved = make_options({}, [(name, text)])
        assert make_options(load_yaml(options_to_yaml(saved))) == saved


def load_yaml(text):
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.create(text))


WRONG = [
    ("pretrained.model", ""),
    ("resume_from", ""),
    ("save_dir", ""),
    ("train.lora_path", ""),
    ("datasets.a.folder", ""),
    ("train.learning_rate", "none"),
    ("train.learning_rate", "nan"),
    ("seed", "None"),
    ("seed", "-1"),
    ("seed", str(2**64)),
    ("seed.x", "1"),
    ("train", "1"),
    ("train.reward_fn", "3"),
    ("test.seed", "1:30"),
    ("num_epochs", "True"),
    ("train.decay_type", "True"),
    ("sample.noise_steps", "True"),
    ("sample.noise_steps", "-1"),
    ("test.num_steps", "2000000000"),
    ("train.resolution", "8000000"),
    ("train.reward_fn_kwargs.ocr", "{'a': {'b': 1, 'b': 2}}"),  # one key twice
]


@pytest.mark.parametrize(("name", "text"), WRONG)
def test_a_wrong_value_is_named(name, text):
    with pytest.raises(ConfigError, match=f"config.{name.removesuffix('.x')}\\b"):
        make_options({}, [(name, text)])


def test_all_problems_are_said_at_once():
    overrides = {
        "num_steps": "1",
        "model": "x",
        "trian.beta": "1",
        "train.beta": "much",
        "logdir": "y",
    }
    with pytest.raises(ConfigError) as caught:
        make_options({"seed": -1, "train": {"learning_rat": 1}}, overrides.items())
    for named in (
        "config.num_steps. Did you mean config.sample.num_steps or config.test.num_steps?",
        "config.model. Did you mean config.pretrained.model?",
        "config.trian. Did you mean config.train?",
        "config.train.learning_rat. Did you mean config.train.learning_rate?",
        "config.train.beta='much'",
        "config.seed=-1",
        "use config.save_dir",
    ):
        assert str(caught.value).count(named) == 1, named


def test_tables_in_a_file(load_file):
    assert load_file("") == make_options({}) == RunOptions()
    options = load_file(
        """
        config.train.reward_fn = {"pkg.mod:factory": 1.0, "ocr": 1}
        config.train.reward_fn.ocr = 0.5
        config.test.reward_fn = config.train.reward_fn
        config.test.reward_fn.guard = 4
        kwargs = {"pkg.mod:factory": {"size": (1, 2), "nested": {"a.b": None}}}
        kwargs["ocr"] = {"server": "x"}
        config.train.reward_fn_kwargs = kwargs
        """,
        ("train.reward_fn.pkg.mod:factory", "2"),
        ("train.reward_fn_kwargs.pkg.mod:factory.scale", "3e-2"),
        ("train.reward_fn_kwargs.ocr.server", "None"),
        ("test.reward_fn_kwargs.ocr.note", "it's [open"),
        ("test.reward_fn_kwargs.ocr.image_labels", "<img{n}>: "),
        ("test.reward_fn_kwargs.ocr.text", "a: 'b' #1 "),
        ("test.reward_fn_kwargs.ocr.quoted", "'1'"),
        ("train.loss_kwargs.scale", "1e-3"),
    )
    assert options.train.reward_fn == {"pkg.mod:factory": 2, "ocr": 0.5}
    assert options.test.reward_fn == {"pkg.mod:factory": 1, "ocr": 0.5, "guard": 4}
    assert options.train.reward_fn_kwargs == {
        "pkg.mod:factory": {"size": [1, 2], "nested": {"a.b": None}, "scale": 0.03},
        "ocr": {"server": None},
    }
    texts = {"image_labels": "<img{n}>: ", "text": "a: 'b' #1 ", "quoted": "1"}
    assert options.test.reward_fn_kwargs == {"ocr": {"note": "it's [open"} | texts}
    assert options.train.loss_kwargs == {"scale": 1e-3}
    assert make_options(load_yaml(options_to_yaml(options))) == options


TEXTS = [
    "007", "-01.5", "12:30", "off", "No", "on", "y", "~", "~/a", "+3", "0x1F", "0o17", "1_000",
    ".inf", "nan", "2026-11-29", "5%", "?", "*a", "=", "<<", "1.2.3", "1e", ".", "-", "e5", "${x}",
    "[a-z]+", "it's", "- a", "&a 3", "!!str 3", "3 # three", "a: 1", " x ", "{n}: ", "{n}",
]  # fmt: skip
ARGUMENTS = {
    **dict(zip(TEXTS, TEXTS, strict=True)),
    "true": True, "True": True, "FALSE": False, "None": None, "none": None, "null": None, "": None,
    "7": 7, "-0": 0, "0": 0, "1e-5": 1e-5, "1E5": 1e5, "-3.25": -3.25, ".5": 0.5, "5.": 5.0,
    " 3 ": 3,
    "'007'": "007", '"off"': "off", "''": "", "'it''s'": "it's", "[]": [],
    '[1, "2", 007, off, None, ~, null, 1e-5, [True]]': [
        1, "2", "007", "off", None, "~", None, 1e-5, [True]
    ],
    "{'a': None, b: true, \"c\": {'1': .5, 2: 12:30}, 'd': 'None'}": {
        "a": None, "b": True, "c": {"1": 0.5, "2": "12:30"}, "d": "None"
    },
}  # fmt: skip


def test_arguments_of_a_reward_are_json_or_python_or_texts():
    """Of YAML 1.1, 007 would be 7, 12:30 would be 750, off would be False."""
    name = "train.reward_fn_kwargs.a:b"
    overrides = []
    for number, text in enumerate(ARGUMENTS):
        overrides.append((f"{name}.x{number}", text))
    options = make_options({}, overrides)
    found = dict(zip(ARGUMENTS, options.train.reward_fn_kwargs["a:b"].values(), strict=True))
    assert repr(found) == repr(ARGUMENTS)
    assert make_options(load_yaml(options_to_yaml(options))) == options


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("config.train.reward_fn_kwargs = {'ocr': {'reader': print}}", "reward_fn_kwargs.ocr.read"),
        ("config.train.aggregate_fn = 3", "config.train.aggregate_fn="),
        ("config.trian.seed = 3", "trian"),
        ("import nowhere_installed", "nowhere_installed"),
        ("config.train.bata = 1", "config.train.bata.* config.train.beta"),
        ("config.seed = sead", "'sead'.*, line [0-9]"),
        ("config.seed = ", "SyntaxError.*, line [0-9]"),
        ("raise SystemExit(3)", "SystemExit: 3.*, line [0-9]"),
    ],
)
def test_wrong_line_of_a_file_names_the_option(load_file, line, named):
    with pytest.raises(ConfigError, match=named):
        load_file(line)


@pytest.mark.parametrize(
    "source",
    [
        "nowhere.yaml",
        "notes.txt",
        "empty.py",
        "returns_nothing.py:mine",
        "broken.yaml",
        "grpo.py:toy_t2iss",
    ],
)
def test_unusable_source_is_named(source, tmp_path):
    (tmp_path / "empty.py").write_text("")
    nothing = "def mine(): pass\nSUFFIXES = {}\n"
    (tmp_path / "returns_nothing.py").write_text(nothing)
    (tmp_path / "broken.yaml").write_text("seed: [1")
    folder = CONFIG if source.startswith("grpo") else tmp_path
    with pytest.raises(ConfigError, match=source.partition(":")[2] or source.partition(":")[0]):
        load_options(f"{folder}/{source}")


OWN_CONFIGURATION = """

def negated(**rewards):
    return {k: -r for k, r in next(iter(rewards.values())).items()}


def my_set():
    config = t2is()
    config.train.aggregate_fn = negated
    return config


def my_set_fast():
    config = my_set()
    config.seed = 5
    return config
"""


def test_a_function_of_the_users_copy_is_a_named_configuration(tmp_path):
    shutil.copytree(CONFIG, tmp_path, dirs_exist_ok=True)
    with (tmp_path / "grpo.py").open("a") as file:
        file.write(OWN_CONFIGURATION)
    # As in a run's config.yaml.
    saved = describe(load_options(f"{tmp_path}/grpo.py:my_set").train.aggregate_fn)
    assert saved == f"{tmp_path}/grpo.py:negated"
    assert get_aggregate_fn(saved)(r={"a": 1}) == {"a": -1}
    # A function for a name with a suffix wins, wherever the suffix stands.
    both = load_options(f"{tmp_path}/grpo.py:my_set_nft_fast")
    assert (both.seed, both.train.loss_type, both.sample.tail_steps) == (5, "nft", None)
    for wrong in ("np", "config_dict", "_MODULE", "get_config", "negated", "for_24gb", "my_sett"):
        with pytest.raises(ConfigError):
            load_options(f"{tmp_path}/grpo.py:{wrong}")


def test_values_of_a_saved_run_can_be_changed(tmp_path):
    """That it loads to equal options is tested by type, and in training/test_run.py."""
    file = tmp_path / "config.yaml"
    options = load("toy_kontext", ("test.seed", "9"))
    file.write_text(options_to_yaml(options))
    changed = replace(options, test=replace(options.test, seed=None))
    assert load_options(str(file), [("test.seed", "None")]) == changed
    file.write_text("train: {reward_fn: , learning_rate: 1e-3}")
    assert load_options(str(file)).train.learning_rate == 1e-3
    # Saved by a version before 0.7; anywhere else, the old option ends in an explanation.
    for text, transition in (("sample: {cps: true}", "cps"), ("sample: {cps: no}", "flow_sde")):
        file.write_text(text)
        assert load_options(str(file)).sample.transition == transition
        with pytest.raises(ConfigError, match=r"config.sample.cps .* config.sample.transition"):
            load_options(str(file), [("sample.cps", "False")])
    for text in ("- 3", "train: {ema: maybe}"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="config"):
            load_options(str(file))


def test_of_two_suffixes_the_longer_one_is_meant_and_helpers_are_no_configurations(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from paco_grpo.options import config_dict\n"
        "from paco_grpo.options import config_dict as another\n"
        "def mine(): return config_dict()\n"
        "def fast(config): config.seed = config.num_epochs + 1\n"
        "def very_fast(config): config.num_epochs = 5\n"
        "SUFFIXES = {'_fast': fast, '_very_fast': very_fast}\n"
    )
    options = load_options(f"{file}:mine_very_fast")
    assert (options.seed, options.num_epochs) == (RunOptions().seed, 5)
    options = load_options(f"{file}:mine_very_fast_fast")
    assert (options.seed, options.num_epochs) == (6, 5)
    options = load_options(f"{file}:mine_fast_very_fast")  # they change it one after the other
    assert (options.seed, options.num_epochs) == (1001, 5)
    with pytest.raises(ConfigError, match=r"Known: mine, _fast"):
        load_options(f"{file}:another")
