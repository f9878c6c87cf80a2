"""The arguments of a reward reach it by every road: those of a run, of a prompt set, of one that is
only evaluated, and of a judge at another address.
"""

import json

import pytest
from fakes import fake_judge
from PIL import Image
from reward_factories import of_set
from tiny_run import brightness, load_script, tiny_options, write_prompts

from paco_grpo.commands.evaluate import BENCHMARKS
from paco_grpo.data.sets import reward_arguments
from paco_grpo.options import options_to_yaml
from paco_grpo.types import Item
from paco_judge.files import read_json_lines

NAME = "consistency_score"
SAID = "reward_factories:said"
CONSTANT = "reward_factories:factory"
GRAY = "reward_factories:of_set"
BRIGHT = "tiny_run:brightness"


@pytest.fixture(scope="module")
def sets(tiny_flux_dir, tmp_path_factory):
    """Options of a run on two prompt sets, with arguments in every place that may have some."""
    folder = tmp_path_factory.mktemp("sets")
    prompts = str(write_prompts(folder / "prompts", test=2))
    judge = {"model": "mine", "question": "criteria", "image_labels": "Image {n}:", "port": 1}
    trained = {
        "folder": prompts,
        "reward_fn": {CONSTANT: 1.0},
        "reward_fn_kwargs": {CONSTANT: {"scale": 3.0}},
    }
    evaluated = {
        "folder": prompts,
        "test_reward_fn": {GRAY: 1.0, NAME: 0.5},
        "reward_fn_kwargs": {GRAY: {"begins": "", "factor": 7.0}, NAME: judge},
    }
    return tiny_options(
        tiny_flux_dir,
        folder,
        dataset="",
        datasets=json.dumps({"a": trained, "b": evaluated}),
        train__reward_fn={BRIGHT: 2.0},
        train__reward_fn_kwargs={BRIGHT: {"scale": 5.0}, SAID: {"value": 11.0}},
        test__reward_fn_kwargs={SAID: {"value": 13.0}},
        test__num_images=1,
    )


def test_a_benchmark_asks_with_the_arguments_of_the_run(sets, tmp_path, monkeypatch):
    rewards = (SAID, GRAY, CONSTANT, BRIGHT)
    monkeypatch.setitem(BENCHMARKS, "mine", ("nowhere", "geneval", rewards))
    write_prompts(tmp_path / "of benchmark", test=3)
    (tmp_path / "saved.yaml").write_text(options_to_yaml(sets))
    command = ["--config", f"{tmp_path}/saved.yaml", "--output", str(tmp_path / "out")]
    command += ["--benchmarks", f"mine={tmp_path}/of benchmark"]
    assert load_script("evaluate").main(command) == 0
    rows = read_json_lines(tmp_path / "out" / "mine" / "eval_data.jsonl")
    assert len(rows) == 3
    for row in rows:
        item = Item(0, row["prompt"])
        image = Image.open(tmp_path / "out" / "mine" / row["file"])
        expected = {
            "said": 13,
            "of_set": of_set(begins="", factor=7.0)([image], [item])[0],
            "factory": 3,
            "brightness": brightness(scale=5.0)([image], [item])[0],
        }
        assert row["rewards"] == pytest.approx(expected)


def test_images_are_judged_with_the_arguments_of_the_sets_judge(sets, tmp_path):
    """But at the address that the command gives."""
    criteria = {"style": {"line": "thin lines"}, "logic": {"order": "a then b"}}
    row = {"prompt": "1x2 grid. [LEFT]: a. [RIGHT]: b.", "criteria": criteria}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (tmp_path / "saved.yaml").write_text(options_to_yaml(sets))
    command = ["--config", f"{tmp_path}/saved.yaml", "--output", str(tmp_path / "out")]
    command += ["--prompts_file", str(tmp_path / "rows.jsonl"), "--seeds", "1"]
    with fake_judge.FakeJudge(models=("other", "mine")) as judge:
        assert load_script("generate").main([*command, "--judge", judge.url]) == 0
    asked = [json.dumps(request["messages"]) for request in judge.requests]
    assert len(asked) == 3 and {request["model"] for request in judge.requests} == {"mine"}
    assert all("Image 1:" in text for text in asked)
    for criterion in ("thin lines", "a then b"):  # the first question was asked at the start
        assert sum(criterion in text for text in asked[1:]) == 1


def test_arguments_of_training_come_first(tiny_flux_dir, tmp_path):
    of_set = {"folder": "x", "reward_fn": {SAID: 1.0}, "reward_fn_kwargs": {SAID: {"value": 17.0}}}
    datasets = {"a": {"folder": "x", "test_reward_fn": {SAID: 1.0}}, "b": of_set}
    options = tiny_options(tiny_flux_dir, tmp_path, dataset="", datasets=json.dumps(datasets))
    assert reward_arguments(options, SAID) == {"value": 17.0}
