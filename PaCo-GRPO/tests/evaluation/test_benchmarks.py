"""scripts/evaluate.py on benchmarks and against another adapter: intervals, pairs, refusals."""

import json

import numpy as np
import pytest
from fakes import fake_judge
from tiny_pipelines import save_clip, save_open_clip
from tiny_run import load_script, write_edits, write_prompts

from paco_grpo.commands import compare
from paco_grpo.evaluation.benchmarks import options_for
from paco_grpo.evaluation.intervals import interval, markdown, reward_intervals
from paco_grpo.evaluation.pictures import read_rows


def rows(*scores: list[float | None]) -> list[dict]:
    """Rows of an evaluation; scores of each item's images."""
    images = []
    for item_id, values in enumerate(scores):
        images += [{"item_id": item_id, "rewards": {"r": score}} for score in values]
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


@pytest.mark.parametrize("against", ["difference", "base"])
def test_an_adapter_called_like_a_column_has_one_of_its_own(tmp_path, against):
    for folder, score in ((tmp_path, 0.75), (tmp_path / "against", 0.5)):
        folder.mkdir(exist_ok=True)
        lines = ""
        for row in rows([score], [score]):
            lines += json.dumps(row | {"open": False, "category": None}) + "\n"
        (folder / "eval_data.jsonl").write_text(lines)
    compare.results(tmp_path, "base", against)
    columns = json.loads((tmp_path / "results.json").read_text())["results"]
    means = {name: column["r"]["mean"] for name, column in columns.items()}
    assert means == {"base": 0.75, f"{against} (against)": 0.5, "difference": 0.25}


def test_prompts_count_once_and_a_missing_score_leaves_its_prompt_out():
    a = rows([1.0, 0.0], [0.5, None], [0.25, 0.75])
    b = rows([0.0, 0.0], [0.0, 0.0], [None, 0.0])
    summary = reward_intervals(a)
    assert summary["r"].mean == pytest.approx(0.5)
    assert summary["r"].prompts == 2
    assert "| r | 0.5000" in markdown({"a": summary})
    difference = reward_intervals(a, b)["r"]
    assert difference.mean == 0.5
    assert difference.prompts == 1


def test_a_prompt_may_hold_a_line_separator(tmp_path):
    (tmp_path / "eval_data.jsonl").write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    assert read_rows(tmp_path) == [{"prompt": "a\u2028b"}]


def test_two_adapters_on_t2is(trained_run, tmp_path, capsys, monkeypatch):
    """Judge, OpenCLIP and PickScore; stopped after the first adapter, and continued."""
    checkpoint = str(trained_run.folder / "checkpoints" / "epoch_0002")
    prompts = write_prompts(tmp_path / "t2is", train=0, test=4)
    out = tmp_path / "out"
    architecture, weights = save_open_clip(tmp_path / "open_clip")
    clip = save_clip(tmp_path / "clip")
    main = load_script("evaluate").main
    run = compare.Evaluation.run

    def run_the_first_only(evaluation, folder, **keywords):
        if folder.name == "against":
            raise ZeroDivisionError
        return run(evaluation, folder, **keywords)

    with fake_judge.FakeJudge() as judge:
        kwargs = {
            "consistency_score": {"base_url": judge.url},
            "subfig_clipT": {"model": architecture, "pretrained": weights},
            "pickscore": {"model": clip, "processor": clip},
        }
        command = ["--config", str(trained_run.folder / "saved.yaml"), "--output", str(out)]
        command += ["--adapter", checkpoint, "--against", "base", "--benchmarks", f"t2is={prompts}"]
        command.append(f"--config.test.reward_fn_kwargs={kwargs!r}")
        # As long as training would make it: the benchmark has no training prompts.
        command.append("--config.max_sequence_length=0")
        with monkeypatch.context() as patch:
            patch.setattr(compare.Evaluation, "run", run_the_first_only)
            with pytest.raises(ZeroDivisionError):
                main(command)
        num_requests = len(judge.requests)
        assert num_requests > 0
        images = [path for path in out.rglob("*.png") if path.stem.isdigit()]
        times = [path.stat().st_mtime_ns for path in images]
        assert len(images) == 4
        assert main(command) == 0
        assert [path.stat().st_mtime_ns for path in images] == times
        for _ in range(2):  # the second time, nothing is left to do
            # The question at the start is known by now.
            assert len(judge.requests) == 2 * num_requests - 1
            assert main(command) == 0
        printed = capsys.readouterr().out
        assert "## t2is" in printed
        assert "| difference |" in printed
        assert main([*command, "--config.test.num_steps=3"]) == 1  # another command is not mixed in
        assert "config.test.num_steps" in capsys.readouterr().err

    record = json.loads((out / "t2is" / "results.json").read_text())
    assert record["adapter"] == checkpoint
    assert record["against"] == "base"
    assert record["missing"]["pickscore"] == 0
    results = record["results"]
    assert set(results) == {checkpoint, "base", "difference"}
    adapter_rows = read_rows(out / "t2is")
    base_rows = read_rows(out / "t2is" / "against")
    for name in ("consistency_score", "subfig_clipT", "pickscore"):
        differences = []
        for a, b in zip(adapter_rows, base_rows, strict=True):
            differences.append(a["rewards"][name] - b["rewards"][name])
        assert results["difference"][name]["mean"] == pytest.approx(np.mean(differences))
    assert results["difference"]["consistency_score"]["mean"] == 0
    assert "maintain consistency" in (out / "t2is/questions.json").read_text()


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
