"""scripts/evaluate.py on benchmarks and against another adapter: intervals, pairs, refusals."""

import json

import numpy as np
import pytest
from fakes import fake_judge
from tiny_pipelines import save_clip, save_open_clip
from tiny_run import load_script, write_edits, write_prompts

from paco_grpo.evaluation.benchmarks import options_for
from paco_grpo.evaluation.intervals import interval, intervals, markdown
from paco_grpo.evaluation.pictures import read_rows


def rows(*scores: list[float | None]) -> list[dict]:
    """Rows of an evaluation; scores of each item's images."""
    images = []
    for item_id, values in enumerate(scores):
        images += [{"item_id": item_id, "open": False, "rewards": {"r": score}} for score in values]
    return images


def test_interval_agrees_with_the_normal_one_where_that_holds():
    values = np.random.default_rng(3).normal(0.4, 0.2, 500)
    measured = interval(np.append(values, np.nan))
    half = 1.959964 * values.std(ddof=1) / np.sqrt(500)
    assert measured.mean == pytest.approx(values.mean())
    assert measured.prompts == 500
    assert measured.low == pytest.approx(measured.mean - half, abs=0.05 * half)
    assert measured.high == pytest.approx(measured.mean + half, abs=0.05 * half)
    assert interval(np.array([np.nan])) is None
    assert interval(np.array([0.5, np.nan])).low is None


def test_few_prompts_have_no_interval():
    values = np.linspace(0.1, 0.9, 10)
    assert interval(values).low < interval(values).mean < interval(values).high
    few = interval(values[:9])
    assert (few.mean, few.low, few.high) == (pytest.approx(0.5 - 0.4 / 9), None, None)
    assert "too few" in markdown({"a": {"r": few}})
    assert "too few" not in markdown({"a": {"r": interval(values)}})


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


def test_t2is_continues_where_it_stopped(trained_run, tmp_path, capsys):
    """Judge, OpenCLIP and PickScore, on prompts that the run has not seen."""
    prompts = write_prompts(tmp_path / "t2is", train=0, test=4)
    out = tmp_path / "out" / "t2is"
    architecture, weights = save_open_clip(tmp_path / "open_clip")
    clip = save_clip(tmp_path / "clip")
    main = load_script("evaluate").main
    with fake_judge.FakeJudge() as judge:
        kwargs = {
            "consistency_score": {"base_url": judge.url},
            "subfig_clipT": {"model": architecture, "pretrained": weights},
            "pickscore": {"model": clip, "processor": clip},
        }
        command = ["--config", str(trained_run.folder / "saved.yaml"), "--output", str(out.parent)]
        command += ["--benchmarks", f"t2is={prompts}"]
        command.append(f"--config.test.reward_fn_kwargs={kwargs!r}")
        # As long as training would make it: the benchmark has no training prompts.
        command.append("--config.max_sequence_length=0")
        assert main(command) == 0
        rows = read_rows(out)
        assert [len(row["rewards"]) for row in rows] == [3] * 4
        contents = {file: file.read_bytes() for file in out.glob("0*.png")}
        times = {file: file.stat().st_mtime_ns for file in contents}
        assert len(times) == 4

        lost = out / "00003.png"
        lost.unlink()
        (out / "metrics.json").unlink()
        assert main(command) == 0
        assert read_rows(out) == rows
        assert {file: file.read_bytes() for file in contents} == contents
        changed = [file for file in times if file.stat().st_mtime_ns != times[file]]
        assert changed == [lost]
        num_requests = len(judge.requests)
        assert main(command) == 0  # nothing is left to do
        assert len(judge.requests) == num_requests + 1  # the question at the start
        assert "## t2is" in capsys.readouterr().out
        assert main([*command, "--config.test.num_steps=3"]) == 1  # another command is not mixed in
        assert "config.test.num_steps" in capsys.readouterr().err

    record = json.loads((out / "results.json").read_text())
    assert (record["adapter"], record["against"]) == ("base", None)
    assert record["missing"]["pickscore"] == 0
    for name in ("consistency_score", "subfig_clipT", "pickscore"):
        mean = np.mean([row["rewards"][name] for row in rows])
        assert record["results"]["adapter"][name]["mean"] == pytest.approx(mean)
    assert "maintain consistency" in (out / "questions.json").read_text()


def test_what_cannot_be_measured_is_refused_before_loading(trained_run, tmp_path, capsys):
    edits = f"gedit={write_edits(tmp_path / 'gedit')}"
    wrong = "--config.test.reward_fn_kwargs.consistency_for_editin.port=1"
    command = ["--config", str(trained_run.folder / "saved.yaml")]
    command += ["--output", str(tmp_path / "out"), "--benchmarks"]
    for arguments, problem in (
        (["t2iss"], "Did you mean 't2is'"),
        ([edits], "text alone"),
        (["t2is"], "dataset/fetch.py t2is"),
        ([edits, wrong], "Did you mean 'consistency_for_editing'"),
        ([edits, "--images_per_prompt", "0"], "at least 4"),
    ):
        assert load_script("evaluate").main([*command, *arguments]) == 1
        assert problem in capsys.readouterr().err
    options = options_for(trained_run.options, edits)
    assert list(options.test.reward_fn) == ["consistency_for_editing"]
    assert options.prompt_fn == "geneval_image"
