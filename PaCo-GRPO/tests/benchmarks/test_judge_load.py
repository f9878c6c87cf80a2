"""benchmarks/judge_load.py against small HTTP judges of known delay."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import judge_load as benchmark
import tables

ROOT = Path(__file__).resolve().parents[2]


def load_file(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FakeJudge = load_file(ROOT.parent / "PaCo-Reward" / "judge" / "tests" / "fake_judge.py").FakeJudge


def test_two_servers_take_turns_and_the_slower_one_is_seen(tmp_path, capsys):
    with FakeJudge(delay_s=0.03) as fast, FakeJudge(delay_s=0.12) as slow:
        command = ["--target", f"fast={fast.url}", "--target", f"slow={slow.url}/v1", "--model", "paco-reward-7b"]
        command += [
            "--concurrency",
            "1",
            "4",
            "--pairs",
            "6",
            "--rounds",
            "3",
            "--output",
            str(tmp_path / "judge_load.json"),
        ]
        assert benchmark.main(command) == 0
        assert len(fast.requests) == len(slow.requests) == 1 + 4 + 3 * (6 + 6)
        assert slow.max_in_flight <= 4
    report = json.loads((tmp_path / "judge_load.json").read_text())
    for row in report["compared"]:
        assert (row["target"], row["base"]) == ("slow", "fast")
        assert row["throughput_ratio"] < 0.8 and row["p50_ratio"] > 1.2 and row["added_p50_ms"] > 15
    assert len(report["rounds"]) == 2 * 2 * 3
    order = [each["target"] for each in report["rounds"]]
    assert order != ["fast", "slow"] * 6, "the order changes between rounds"
    printed = capsys.readouterr().out
    assert tables.main([str(tmp_path)]) == 0
    assert printed in (tmp_path / "tables.md").read_text() and "| slow to fast | 4 |" in printed
    assert (tmp_path / "judge_load.png").stat().st_size > 3000


def test_pictures_are_new_in_every_round(tmp_path):
    with FakeJudge() as judge:
        command = ["--target", f"a={judge.url}", "--model", "Paco-Reward-7B", "--pairs", "6", "--rounds", "2"]
        assert benchmark.main([*command, "--concurrency", "2", "--output", str(tmp_path / "judge_load.json")]) == 0
        asked = [json.dumps(request["messages"]) for request in judge.requests]
    assert len(set(asked)) == len(asked) == 2 + 2 * 6


def test_errors_are_counted_and_are_no_latencies(tmp_path):
    def respond(number, request):
        return (400, {"error": {"message": "no"}}, {}) if number % 2 else (200, b"{}", {})

    with FakeJudge(respond) as judge:
        command = ["--target", f"a={judge.url}", "--model", "Paco-Reward-7B", "--pairs", "8", "--rounds", "1"]
        assert benchmark.main([*command, "--concurrency", "1", "--output", str(tmp_path / "judge_load.json")]) == 0
    (row,) = json.loads((tmp_path / "judge_load.json").read_text())["rounds"]
    assert row["errors"] == len(row["latencies_ms"]) == 4 and "HTTP 400: no" in row["first_error"]


def test_a_server_that_answers_nothing_has_no_figures_beside_one_that_does(tmp_path, capsys):
    with FakeJudge() as good, FakeJudge(lambda number, request: (400, {}, {})) as bad:
        command = ["--target", f"good={good.url}", "--target", f"bad={bad.url}", "--model", "Paco-Reward-7B"]
        command += ["--pairs", "2", "--rounds", "1", "--concurrency", "1"]
        assert benchmark.main([*command, "--output", str(tmp_path / "judge_load.json")]) == 0
        assert benchmark.main([*command[2:], "--output", str(tmp_path / "bad.json")]) == 2
    report = json.loads((tmp_path / "judge_load.json").read_text())
    assert report["targets"][1]["p50_ms"] is None and report["compared"][0]["throughput_ratio"] is None
    captured = capsys.readouterr()
    assert "| bad | 1 | 0.0 | – | – | – | 2 |" in captured.out and "no request was answered" in captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--target", "no-url"],
        ["--target", "a=http://127.0.0.1:9", "--target", "a=http://127.0.0.1:9"],
        ["--target", "a=http://127.0.0.1:9", "--compare", "a/b"],
        ["--target", "a=http://127.0.0.1:9"],
    ],
    ids=["form", "twice", "compare", "nobody there"],
)
def test_what_cannot_be_measured_is_said(arguments, capsys):
    assert benchmark.main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_help_teaches():
    said = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "judge_load.py", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "--compare gateway/vllm" in said and "medians" in said
