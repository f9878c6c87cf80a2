"""Snippets of the published PaCo-GRPO guide, the files of examples/, and rows of the data page."""

import re
import subprocess
import sys

import numpy as np
import pytest
import tiny_judge
from fakes import fake_judge
from terminal import REPOSITORY
from tiny_run import rows_of, tiny_options, train

from paco_grpo.advantages.aggregation import get_aggregate_fn
from paco_grpo.data.prompts import load_prompts
from paco_grpo.options import load_options
from paco_judge import Judge
from paco_judge.grid import split_prompt

EXAMPLES = REPOSITORY / "examples"
TOY_FLUX = REPOSITORY / "quickstart" / "models" / "flux"

RESOLUTIONS = """
# For simple tasks like GenEval, OCR, or PickScore:
config.train.resolution = 256
config.test.resolution = 512

# For the Text-to-ImageSet task,
# e.g., where the output image is a 2x2 grid layout of 4 512x512 sub-images:
config.train.resolution = 512
config.test.resolution = 1024
"""
REWARDS = """
config.train.reward_fn = {
    "consistency_score": 0.2,
    "subfig_clipT": 1,
    "pickscore": 1,
}

config.test.reward_fn = {
    "consistency_score": 0.1,
    "subfig_clipT": 1.5,
    "pickscore": 1,
}
config.train.aggregate_fn = None
"""
MEAN = "config.train.aggregate_fn = geometric_mean_aggregate_fn  # See config/grpo.py\n"
ADVANTAGES = """
config.train.aggregate_fn = weighted_advantage_sum_aggregate_fn(
    reward_weights=config.train.reward_fn,
    global_std=True
)
"""
OWN = """
def summation_agg_fn(**grouped_rewards):
    prompts = next(iter(grouped_rewards.values())).keys()
    advantages = {}
    for prompt in prompts:
        reward_stack = np.stack([
            grouped_rewards[reward_name][prompt] 
            for reward_name in grouped_rewards
        ], axis=0)
        advantages[prompt] = np.sum(reward_stack, axis=0)
    
    return advantages
"""
JUDGES = """
config.train.reward_fn_kwargs = {
    'consistency_score': {
        'model': 'Paco-Reward-7B',
        'port': 8000
    },
}

config.test.reward_fn_kwargs = {
    'consistency_score': {
        'model': 'Gemma-3-4B-IT',
        'port': 8001
    },
}
"""


def paste(tmp_path, snippet, top=""):
    """Options of ``t2is`` with a snippet at the end of its function and ``top`` at the file's."""
    indented = "".join(f"    {line}" for line in snippet.splitlines(keepends=True))
    original = (REPOSITORY / "PaCo-GRPO" / "config" / "grpo.py").read_text()
    file = tmp_path / "grpo.py"
    file.write_text(
        top + original.replace("    return config\n", f"{indented}\n    return config\n", 1)
    )
    return load_options(f"{file}:t2is")


def test_options(tmp_path):
    options = paste(tmp_path, RESOLUTIONS + REWARDS + JUDGES)
    train, test = options.train, options.test
    assert (train.resolution, test.resolution) == (512, 1024)
    assert train.reward_fn == {"consistency_score": 0.2, "subfig_clipT": 1, "pickscore": 1}
    assert test.reward_fn == {"consistency_score": 0.1, "subfig_clipT": 1.5, "pickscore": 1}
    judge, gemma = (part.reward_fn_kwargs["consistency_score"] for part in (train, test))
    assert judge == {"model": "Paco-Reward-7B", "port": 8000}
    assert gemma == {"model": "Gemma-3-4B-IT", "port": 8001}


def weighted_advantages(a, b):
    return 0.2 * (a - a.mean(1, keepdims=True)) / a.std() + (b - b.mean(1, keepdims=True)) / b.std()


@pytest.mark.parametrize(
    ("snippet", "top", "expected"),
    [
        (MEAN, "", lambda a, b: np.sqrt(a * b)),
        (ADVANTAGES, "", weighted_advantages),
        ("config.train.aggregate_fn = summation_agg_fn\n", OWN, np.add),
    ],
    ids=["mean", "advantages", "own"],
)
def test_aggregations(tmp_path, snippet, top, expected):
    train = paste(tmp_path, snippet, top).train
    one = np.array([[0.1, 0.2], [0.3, 0.4]])  # (prompts, images)
    other = np.array([[0.3, 0.5], [0.5, 0.6]])
    function = get_aggregate_fn(train.aggregate_fn, train.reward_fn)
    groups = [dict(zip("pq", scores, strict=True)) for scores in (one, other)]
    values = function(consistency_score=groups[0], subfig_clipT=groups[1])
    np.testing.assert_allclose([values["p"], values["q"]], expected(one, other))


def example(name, *arguments):
    """What examples/``name`` prints."""
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_example_scores_a_pair(tmp_path, published):
    judge = published["X-GenGroup/PaCo-Reward-7B"]
    images = [tmp_path / "0.png", tmp_path / "1.png"]
    for number, image in enumerate(images):
        tiny_judge.picture(number).save(image)
    printed = example("score_pair.py", *images, "--theme", "boats", "--model", judge)
    score = Judge.from_pretrained(judge).score(*images, theme="boats")
    assert printed.startswith(f"P(Yes) = {score:.3f}\n")


@pytest.mark.slow
def test_example_scores_a_grid(tmp_path):
    tiny_judge.picture(0).resize((64, 32)).save(tmp_path / "grid.png")
    prompt = "A 1x2 grid layout of one fox. [LEFT]: It eats. [RIGHT]: It runs."
    with fake_judge.FakeJudge(models=("mine", "other")) as server:
        words = ["--server", server.url, "--model", "other"]
        printed = example("score_grid.py", tmp_path / "grid.png", prompt, *words)
        assert server.requests[0]["model"] == "other"
    first, mean = printed.splitlines()
    score = float(first.removeprefix("panels 1 and 2: "))
    assert mean == f"consistency_score = {score:.3f}"


@pytest.mark.slow
def test_example_reward_trains(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    reward = '{"own_reward:colorfulness": 1.0}'
    options = tiny_options(TOY_FLUX, tmp_path, num_epochs=1, train__reward_fn=reward)
    (row,) = rows_of(train(options).run.options, "train")
    assert 0 < row["reward/colorfulness_mean"] < 1


@pytest.mark.slow
def test_example_prompts_are_compared_with_each_other(tmp_path):
    folder = tmp_path / "foxes"
    example("open_prompts.py", folder)
    with fake_judge.FakeJudge() as server:
        judge = {"base_url": server.url, "model": server.models[0]}
        options = tiny_options(
            TOY_FLUX,
            tmp_path,
            dataset=folder,
            num_epochs=1,
            train__reward_fn='{"consistency_score": 1.0, "between_images": 8.0}',
            train__reward_fn_kwargs={"consistency_score": judge, "between_images": judge},
        )
        run = train(options).run
    (row,) = rows_of(run.options, "train")
    assert row["reward/missing_share"] == 0
    assert "reward/within_minus_between" in row


def test_rows_of_the_data_page_are_a_prompt_set(tmp_path):
    page = (REPOSITORY / "PaCo-GRPO" / "dataset" / "README.md").read_text()
    rows = re.search(r"<<'END'\n(.*?)END\n", page, flags=re.DOTALL).group(1)
    (tmp_path / "train_metadata.jsonl").write_text(rows)
    grid, pair = load_prompts(tmp_path, "train")
    assert len(split_prompt(grid.prompt).panels) == 4
    assert pair.metadata["open"]
