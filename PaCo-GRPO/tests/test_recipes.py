"""docs/recipes.md: each code block is written to the file it names and used by its import path."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fakes import fake_judge
from tiny_pipelines import save_clip, save_open_clip
from tiny_policies import build, draw, load, trained
from tiny_run import as_arguments, load_script, overrides_for, rows_of

from paco_grpo.options import OPTIONS, read_options
from paco_grpo.policies.adapters import save_peft
from paco_grpo.rewards.registry import short_name
from paco_grpo.types import Item
from paco_judge.files import read_json_lines

HERE = Path(__file__).resolve().parents[1]
DOCS = HERE.parent / "docs"
RECIPES = (DOCS / "recipes.md").read_text()
PAGES = "\n".join(path.read_text() for path in [HERE / "README.md", *sorted(DOCS.glob("*.md"))])


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """The page's Python files on the import path."""
    for name, code in re.findall(r"```python\n# (my_\w+\.py)\n(.*?)```", RECIPES, flags=re.DOTALL):
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


COMMANDS = re.findall(
    r"^(?:PYTHONPATH=\. )?bash (scripts/\S+\.sh) (.*)",
    RECIPES.replace("\\\n", " "),
    flags=re.MULTILINE,
)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [arguments for _, arguments in COMMANDS])
def test_every_command_trains(arguments, recipes, tiny_flux_dir, tmp_path, monkeypatch):
    """As printed; only models, sizes and the judge's address are those of a test."""
    monkeypatch.chdir(HERE)  # as scripts/launch.sh does
    monkeypatch.syspath_prepend(str(HERE))
    overrides = overrides_for(tiny_flux_dir, tmp_path, num_epochs=1, item_size="aspect")
    for split in ("train", "test"):
        rows = read_json_lines(tmp_path / "prompts" / f"{split}_metadata.jsonl")
        pd.DataFrame(rows)[["prompt", "idx"]].to_csv(tmp_path / "prompts" / f"{split}.csv")
    for option in (
        "train.reward_fn",
        "train.reward_fn_kwargs",
        "train.aggregate_fn",
        "test.reward_fn",
    ):
        del overrides[option]
    name, *changes = shlex.split(arguments)
    source = f"{recipes}/{name}" if ".py:" in name else f"{HERE}/config/grpo.py:{name}"
    open_clip, weights = save_open_clip(tmp_path / "open_clip")
    clip = save_clip(tmp_path / "clip")
    with fake_judge.FakeJudge() as judge:
        places = {
            "consistency_score": {"base_url": judge.url, "model": judge.models[0]},
            "subfig_clipT": {"model": open_clip, "pretrained": weights},
            "subfig_clipI": {"model": open_clip, "pretrained": weights},
            "pickscore": {"model": clip, "processor": clip},
            "clipscore": {"model": clip, "processor": clip},
        }
        save_peft(trained("flux", tiny_flux_dir), tmp_path / "adapter")
        changes = [change.replace("ADAPTER", str(tmp_path / "adapter")) for change in changes]
        command = ["--config", source, *changes, *as_arguments(overrides)]
        options = read_options(command)[0]
        for reward, kwargs in places.items():
            if reward in options.train.reward_fn:
                command.append(f"--config.train.reward_fn_kwargs.{reward}={kwargs!r}")
            elif reward in options.test.reward_fn:
                command.append(f"--config.test.reward_fn_kwargs.{reward}={kwargs!r}")
        assert load_script("train").main(command) == 0
    options = read_options(command)[0]
    (row,) = rows_of(options, "train")
    measured = {short_name(reward) for reward in options.train.reward_fn}
    assert {f"reward/{reward}_mean" for reward in measured} <= set(row)


def test_generator(recipes, tmp_path):
    item = Item(0, "a red star")
    family = "stable_diffusion_3 large"
    folder = build(family, tmp_path / "model")
    images = []
    for name in (None, "my_policies:MyPolicy"):
        policy = load(family, folder, name)
        assert type(policy).__name__ == ("MyPolicy" if name else "StableDiffusion3Policy")
        assert policy.uses_true_cfg
        images += draw(policy, [item], [3], 32, 48, 2)
    assert images[0].size == (48, 32)
    assert np.abs(np.asarray(images[0], int) - np.asarray(images[1], int)).max() <= 1


@pytest.mark.long
def test_the_family_tests_take_a_policy_of_ones_own(recipes, tmp_path):
    tiny = tmp_path / "tiny"
    subprocess.run(
        [sys.executable, HERE / "tests/any_pipelines.py", "StableDiffusion3Pipeline", tiny],
        check=True,
    )
    command = [sys.executable, "-m", "pytest", "-q", HERE / "tests/policies/test_families.py"]
    command += ["--policy", "my_policies:MyPolicy", "--pipeline", tiny]
    command += ["--discarded", r"transformer_blocks\.1\.attn\.add_q_proj"]
    environment = os.environ | {"PYTHONPATH": f"{recipes}:{os.environ.get('PYTHONPATH', '')}"}
    for wrong in (False, True):
        if wrong:
            path = recipes / "my_policies.py"
            path.write_text(path.read_text().replace("1000 * inputs", "900 * inputs"))
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (run.returncode != 0) == wrong, run.stdout
        assert ("own_call[yours]" if wrong else "5 passed") in run.stdout


def test_commands_name_scripts_configurations_and_options_that_exist():
    commands = re.findall(r"bash (scripts/\w+_node/train_\w+\.sh) (.*)", PAGES.replace("\\\n", " "))
    assert len(commands) > 10
    for script, arguments in commands:
        name, *changes = shlex.split(
            arguments.replace("runs/NAME/config.yaml", "t2is"), comments=True
        )
        assert (HERE / script).is_file()
        changes = [change for change in changes if not change.startswith("$")]  # shell variables
        # test_every_command_trains has the others, and a file of one's own is run as printed.
        if ".py:" not in name and not name.endswith(".yaml"):
            read_options(["--config", f"{HERE}/config/grpo.py:{name}", *changes])


def test_named_options_exist():
    # Other trainers' names are in all columns but the last one.
    pages = re.sub(
        r"\|.* here \|\n(?:\|.*\n)+", lambda table: re.sub(r"\|.*\|(.*)\|", r"\1", table[0]), PAGES
    )
    named = re.findall(r"`(?:config\.)?((?:train|sample|test|health|pretrained|speed)\.\w+)", pages)
    named += re.findall(r"`config\.(?!yaml`|json`)(\w+)[`=]", pages)
    groups = {name.partition(".")[0] for name in OPTIONS if "." in name}
    assert len(named) > 20 and [name for name in named if name not in {*OPTIONS, *groups}] == []
