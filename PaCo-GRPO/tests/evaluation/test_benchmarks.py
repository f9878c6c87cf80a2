"""scripts/evaluate.py on benchmarks and against another adapter: intervals, pairing, resuming, refusals."""

import json

import numpy as np
import pytest
from fakes import fake_judge
from tiny_pipelines import save_clip, save_open_clip
from tiny_run import load_script, write_edits, write_prompts

from paco_grpo.commands import evaluate
from paco_grpo.evaluation import benchmarks
from paco_grpo.evaluation.benchmarks import interval, markdown, summarize_prompts
from paco_grpo.evaluation.pictures import read_rows


def rows(*scores: list[float | None]) -> list[dict]:
    """Rows of an evaluation; scores of each item's images."""
    return [
        {"item_id": i, "rewards": {"r": score}}
        for i, values in enumerate(scores)
        for score in values
    ]


def test_interval_agrees_with_the_normal_one_where_that_holds():
    values = np.random.default_rng(3).normal(0.4, 0.2, 500)
    found = interval(np.append(values, np.nan))
    half = 1.959964 * values.std(ddof=1) / np.sqrt(500)
    assert found.mean == pytest.approx(values.mean()) and found.prompts == 500
    assert [found.low, found.high] == pytest.approx(
        [found.mean - half, found.mean + half], abs=0.05 * half
    )
    assert interval(np.array([np.nan])) is None and interval(np.array([0.5, np.nan])).low is None


def test_resamples_in_blocks_are_those_of_one_draw(monkeypatch):
    values = np.random.default_rng(4).normal(size=300)
    whole = interval(values)
    monkeypatch.setattr(benchmarks, "_BLOCK", 7 * 300 + 5)
    assert interval(values) == whole
    drawn = np.random.default_rng(0).integers(300, size=(10_000, 300))
    expected = np.quantile(values[drawn].mean(axis=1), [0.025, 0.975])
    assert [whole.low, whole.high] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("against", ["difference", "base"])
def test_an_adapter_called_like_a_column_has_one_of_its_own(tmp_path, against):
    for folder, score in ((tmp_path, 0.75), (tmp_path / "against", 0.5)):
        folder.mkdir(exist_ok=True)
        lines = [
            json.dumps(row | {"open": False, "category": None}) + "\n"
            for row in rows([score], [score])
        ]
        (folder / "eval_data.jsonl").write_text("".join(lines))
    evaluate.results(tmp_path, "base", against)
    columns = json.loads((tmp_path / "results.json").read_text())["results"]
    means = {name: column["r"]["mean"] for name, column in columns.items()}
    assert means == {"base": 0.75, f"{against} (against)": 0.5, "difference": 0.25}


def test_prompts_count_once_and_a_missing_score_leaves_its_prompt_out():
    a, b = rows([1.0, 0.0], [0.5, None], [0.25, 0.75]), rows([0.0, 0.0], [0.0, 0.0], [None, 0.0])
    assert (
        summarize_prompts(a)["r"].mean == pytest.approx(0.5)
        and summarize_prompts(a)["r"].prompts == 2
    )
    difference = summarize_prompts(a, b)["r"]
    assert (difference.mean, difference.prompts) == (0.5, 1)
    assert "| r | 0.5000" in markdown({"a": summarize_prompts(a)})


def test_a_prompt_may_hold_a_line_separator(tmp_path):
    (tmp_path / "eval_data.jsonl").write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    assert read_rows(tmp_path) == [{"prompt": "a\u2028b"}]


def test_two_adapters_on_t2is(trained_run, tmp_path, capsys, monkeypatch):
    """Judge, OpenCLIP and PickScore; stopped after the first adapter, and continued."""
    config, checkpoint = (
        trained_run.folder / "saved.yaml",
        trained_run.folder / "checkpoints" / "epoch_0002",
    )
    prompts, out = write_prompts(tmp_path / "t2is", train=0, test=4), tmp_path / "out"
    architecture, weights = save_open_clip(tmp_path / "open_clip")
    clip = save_clip(tmp_path / "clip")
    main = load_script("evaluate").main
    with fake_judge.FakeJudge() as judge:
        kwargs = {
            "consistency_score": {"base_url": judge.url},
            "subfig_clipT": {"model": architecture, "pretrained": weights},
            "pickscore": {"model": clip, "processor": clip},
        }
        command = [
            "--config", str(config), "--adapter", str(checkpoint), "--against", "base", "--benchmarks", f"t2is={prompts}",
            "--output", str(out), f"--config.test.reward_fn_kwargs={kwargs!r}",
            "--config.max_sequence_length=0",  # as long as training would make it: the benchmark has no training prompts
        ]  # fmt: skip
        sample = evaluate.Evaluation.run
        load = evaluate.load_generator
        stop = iter([False, True])
        loaded = []
        monkeypatch.setattr(
            evaluate, "load_generator", lambda *given: loaded.append(1) or load(*given)
        )
        with monkeypatch.context() as patch:
            patch.setattr(
                evaluate.Evaluation,
                "run",
                lambda *a, **k: sample(*a, **k) if not next(stop) else 1 / 0,
            )
            with pytest.raises(ZeroDivisionError):
                main(command)
        asked = len(judge.requests)
        made = {path: path.stat().st_mtime_ns for path in out.rglob("*.png") if path.stem.isdigit()}
        assert len(made) == 4 and asked and len(loaded) == 1  # one generator for both adapters
        assert main(command) == 0
        assert all(path.stat().st_mtime_ns == made[path] for path in made)
        for _ in range(2):  # the second time, nothing is left to do
            assert len(loaded) == 2
            assert len(judge.requests) == 2 * asked - 1  # the question at the start is known by now
            assert main(command) == 0
        printed = capsys.readouterr().out
        assert "## t2is" in printed and "| difference |" in printed
        assert main([*command, "--config.test.num_steps=3"]) == 2  # another command is not mixed in
        assert "another test: choose another --output" in capsys.readouterr().err
    found = json.loads((out / "t2is" / "results.json").read_text())
    assert set(found["results"]) == {str(checkpoint), "base", "difference"}
    assert (found["adapter"], found["against"]) == (str(checkpoint), "base")
    a, b = (read_rows(out / "t2is" / name) for name in (".", "against"))
    for name in ("consistency_score", "subfig_clipT", "pickscore"):
        differences = [
            one["rewards"][name] - two["rewards"][name] for one, two in zip(a, b, strict=True)
        ]
        assert found["results"]["difference"][name]["mean"] == pytest.approx(np.mean(differences))
    assert found["results"]["difference"]["consistency_score"]["mean"] == 0
    assert (
        "maintain consistency" in (out / "t2is/questions.json").read_text()
        and found["missing"]["pickscore"] == 0
    )


def test_what_cannot_be_measured_is_refused_before_loading(trained_run, tmp_path, capsys):
    edits = f"gedit={write_edits(tmp_path / 'gedit')}"
    common = [
        "--config",
        str(trained_run.folder / "saved.yaml"),
        "--output",
        str(tmp_path / "out"),
        "--benchmarks",
    ]
    wrong = "--config.test.reward_fn_kwargs.consistency_for_editin.port=1"
    for given, problem in (
        (["t2iss"], "Did you mean 't2is'"), ([edits], "text alone"), (["t2is"], "dataset/fetch.py t2is"),
        ([edits, wrong], "Did you mean 'consistency_for_editing'"), ([edits, "--images_per_prompt", "0"], "at least 4"),
    ):  # fmt: skip
        assert (
            load_script("evaluate").main([*common, *given]) == 2
            and problem in capsys.readouterr().err
        )
    found = benchmarks.options_for(trained_run.options, edits)
    assert (
        list(found.test.reward_fn) == ["consistency_for_editing"]
        and found.prompt_fn == "geneval_image"
    )
