"""scripts/evaluate.py on benchmarks and against another adapter: intervals, pairs, refusals."""

import numpy as np
import pytest
from named import load
from tiny_run import load_script

from paco_grpo.commands.evaluate import options_for
from paco_grpo.data.sets import prompt_sets
from paco_grpo.evaluation.intervals import interval, intervals, markdown
from paco_grpo.training.checks import contradictions


def rows(*scores: list[float | None]) -> list[dict]:
    """Rows of an evaluation; scores of each item's images."""
    images = []
    for item_id, values in enumerate(scores):
        images += [{"item_id": item_id, "open": False, "rewards": {"r": score}} for score in values]
    return images


def test_interval_of_skewed_values_is_of_percentiles():
    """It reaches farther to the side of their tail, unlike a reflected one."""
    rng = np.random.default_rng(0)
    values = rng.exponential(size=20) ** 2
    means = rng.choice(values, size=(20_000, 20)).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    measured = interval(np.append(values, np.nan))
    assert (measured.mean, measured.prompts) == (pytest.approx(values.mean()), 20)
    assert (measured.low, measured.high) == pytest.approx((low, high), abs=0.05)
    assert high - values.mean() > values.mean() - low + 1


def test_few_prompts_have_no_interval():
    values = np.linspace(0.1, 0.9, 10)
    few = interval(values[:9])
    assert (few.mean, few.low, few.high) == (pytest.approx(0.5 - 0.4 / 9), None, None)
    assert interval(np.array([np.nan])) is None
    assert "few" in markdown({"a": {"r": few}})
    assert "few" not in markdown({"a": {"r": interval(values)}})


def test_prompts_count_once_and_a_missing_score_leaves_its_prompt_out():
    a = rows([1.0, 0.0], [0.5, None], [0.25, 0.75])
    b = rows([0.0, 0.0], [0.0, 0.0], [None, 0.0])
    summary = intervals(a)
    assert summary["r"].mean == pytest.approx(0.5)
    assert summary["r"].prompts == 2
    assert "| r | 0.5000" in markdown({"a": summary})
    difference = intervals(a, b)["r"]
    assert difference.mean == 0.5
    assert difference.prompts == 1


@pytest.mark.parametrize(
    ("benchmark", "named"), [("t2iss", "t2is"), ("t2is", "dataset/fetch.py t2is")]
)
def test_what_cannot_be_measured_is_refused(trained_run, tmp_path, capsys, benchmark, named):
    command = ["--config", str(trained_run.folder / "saved.yaml"), "--output", str(tmp_path)]
    assert load_script("evaluate").main([*command, "--benchmarks", benchmark]) == 1
    assert named in capsys.readouterr().err


def test_a_benchmark_has_its_own_prompts_and_rewards(trained_run):
    options = options_for(trained_run.options, "gedit=edits")
    assert list(options.test.reward_fn) == ["consistency_for_editing"]
    assert (options.dataset, options.prompt_fn) == ("edits", "geneval_image")
    assert options.test.num_images is None


def test_a_benchmark_is_one_set_where_the_run_has_several():
    options = load("toy_t2is_sets", ("train.reward_fn", ""))
    options = options_for(options, "t2is=prompts")
    assert contradictions(options) == []
    (prompt_set,) = prompt_sets(options)
    assert prompt_set.folder == "prompts"
    assert list(prompt_set.test.weights) == ["consistency_score", "subfig_clipT", "pickscore"]
