"""The judge on a pretended GPU (tests/pretend_cuda.py at the root): scores, commands and benchmarks
are those of the CPU, and a training in bf16.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from bench_tools import edit_examples, edit_lines, save_edit_bench, save_rank_bench
from pretend_cuda import pretended_gpu
from training_tools import TIMEOUT, train_config

from paco_eval import edit, rank, vc
from paco_judge.judge import Judge
from paco_judge.scorer import JudgeScorer
from paco_reward import demo
from paco_reward.cli import main
from paco_reward.datasets import labeled_pairs

GPU = Path(__file__).resolve().parents[2] / "tests" / "pretend_cuda.py"


def on(device):
    return pretended_gpu() if device == "cuda" else contextlib.nullcontext()


@pytest.mark.slow
def test_scores_are_those_of_the_cpu(scorer, judge_dir, data_dir):
    rows, _ = labeled_pairs(data_dir, "pairs")
    pairs = [rows[number] for number in range(4)]
    expected = [verdict.p_yes for verdict in scorer.score(pairs)]
    with pretended_gpu():
        on_gpu = JudgeScorer.from_pretrained(judge_dir, batch_size=4)
        assert next(on_gpu.model.parameters()).is_cuda
        scores = [verdict.p_yes for verdict in on_gpu.score(pairs)]
    np.testing.assert_allclose(scores, expected, atol=1e-6)


@pytest.mark.slow
def test_accuracy_is_that_of_the_cpu(judge_dir, data_dir, capsys):
    reports = {}
    for device in ("cpu", "cuda"):
        with on(device):
            command = ["accuracy", "--model", str(judge_dir), "--dataset", "held_out"]
            assert main([*command, "--dataset_dir", str(data_dir)]) == 0
        reports[device] = json.loads(capsys.readouterr().out)
    assert reports["cuda"] == pytest.approx(reports["cpu"], abs=1e-5)
    assert reports["cuda"]["n"] == 10 and reports["cuda"]["missing"] == 0


@pytest.mark.slow
def test_the_page_shows_what_it_shows_on_the_cpu(answering_judge, world):
    from gradio_client import Client, handle_file

    grid = world / "grids" / "p0_0.png"
    files = [{"image": handle_file(str(grid)), "caption": None}]
    pages = {}
    for device in ("cpu", "cuda"):
        with on(device):
            judge = Judge.from_pretrained(answering_judge)
            page = demo.build(judge, reason_tokens=4)
            _, url, _ = page.launch(quiet=True, prevent_thread_lock=True)
            client = Client(url, verbose=False)
            pages[device] = client.predict(files, 2, 2, "a paper boat", "", True, api_name="/ask")
            page.close()
    assert re.findall(r"<dd>.*?</dd>", pages["cuda"]) == re.findall(r"<dd>.*?</dd>", pages["cpu"])
    assert scores_on_page(pages["cuda"]) == pytest.approx(scores_on_page(pages["cpu"]), abs=2e-3)


def scores_on_page(page):
    scores = [float(text) for text in re.findall(r'<td class="score"[^>]*>([\d.]+)</td>', page)]
    assert len(scores) == 6
    return scores


def rank_benchmark(folder):
    save_rank_bench(folder / "ConsistencyRank-Bench", 2)
    return rank, ["--dataset_dir", folder]


def edit_benchmark(folder):
    rows = folder / "edits" / "bench.jsonl"
    save_edit_bench(rows, edit_examples(3))
    return edit, ["--dataset", rows, "--output", folder / "summary"]


def vc_benchmark(folder):
    """The edits of Edit-Bench under the names of VCReward-Bench's columns."""
    _, arguments = edit_benchmark(folder)

    def rename(row):
        return {
            "key": row["key"][0],
            "task": "cref",
            "instruction": row["instruction"],
            "winner": "0",
            "source_image": row["input_image"],
            "edited_images": row["output_images"],
        }

    edit_lines(folder / "edits" / "bench.jsonl", dict.fromkeys(range(3), rename))
    return vc, arguments


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", [rank_benchmark, edit_benchmark, vc_benchmark])
def test_benchmarks_have_the_scores_of_the_cpu(benchmark, answering_judge, tmp_path):
    module, arguments = benchmark(tmp_path)
    arguments += ["--model", answering_judge, "--engine", "transformers", "--batch_size", "4"]
    scores = {}
    for device in ("cpu", "cuda"):
        results = tmp_path / device
        with on(device):
            command = [*arguments, "--results_dir", results]
            assert module.main([str(argument) for argument in command]) == 0
        (file,) = results.glob("*.jsonl")
        rows = map(json.loads, file.read_text().splitlines())
        scores[device] = [row["scores"] for row in sorted(rows, key=lambda row: row["index"])]
    np.testing.assert_allclose(scores["cuda"], scores["cpu"], atol=1e-5)
    assert np.ptp(scores["cpu"]) > 0


@pytest.mark.long
def test_training_in_bf16(judge_dir, data_dir, tmp_path):
    config = train_config(judge_dir, data_dir, tmp_path / "out", bf16=True)
    del config["use_cpu"]
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump(config))
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NPROC_PER_NODE": "1"}
    command = [sys.executable, str(GPU), "-m", "paco_reward.cli", "train", str(file)]
    options = {"env": os.environ | settings, "capture_output": True, "text": True}
    done = subprocess.run(command, timeout=TIMEOUT, check=False, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert len(losses) == 2 and np.isfinite(losses).all()
