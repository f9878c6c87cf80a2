"""benchmarks/sweep.py and run_all.sh; compare_engines.py's comparison; medians and ratios."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from named import load

import compare_engines
import epoch
import judge_load
import sweep
from measuring import report

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--preset", "tiny", "--k", "2", "--m", "2"]


def test_variants():
    text = "sample.tail_steps=4 train.reward_fn='{\"a\": 1}' OMP_NUM_THREADS=2 A= processes=2 work=published"
    found = sweep.Variant.parse(text)
    assert found.options == ["--config.sample.tail_steps=4", '--config.train.reward_fn={"a": 1}', "--published-work"]
    assert (found.environment, found.processes) == ({"OMP_NUM_THREADS": "2", "A": ""}, 2)
    assert sweep.Variant.parse("").label == "as configured" and sweep.Variant.parse("work=ours").options == []
    for text in ("sample.merge_lora", "=1", "work=theirs", "processes=two"):
        with pytest.raises(ValueError):
            sweep.Variant.parse(text)


@pytest.mark.long
def test_a_sweep_compares_options_processes_and_images(tmp_path):
    output = tmp_path / "sweep.json"
    variants = ["sample.tail_steps=1", "train.resolution=16", "processes=2 OMP_NUM_THREADS=1"]
    tiny = [*TINY, "--steps", "4", "--batch", "2", "--train-batch", "2", "--warmup", "0"]
    command = ["--rounds", "1", "--repeats", "1", "--images", "--output", str(output)]
    assert sweep.main([*command, *(part for text in variants for part in ("--variant", text)), "--", *tiny]) == 0
    base, tail, small, two = json.loads(output.read_text())["results"]
    assert base["ratio"]["epoch"]["raw"] == [1.0] and base["pixel_rms"] == 0 and base["efficiency"] == 1
    assert tail["calls"]["transformer"] < base["calls"]["transformer"] and tail["pixel_rms"] > 0
    seconds = [each["seconds"]["cpu"]["median"] for each in (base, tail)]
    assert tail["ratio"]["cpu"]["median"] == pytest.approx(seconds[1] / seconds[0])
    assert "pixel_rms" not in small and small["config"]["train"]["resolution"] == 16
    assert two["calls"]["transformer"] == base["calls"]["transformer"]
    assert two["flops"]["training"] == base["flops"]["training"]
    assert 0 < two["rates"]["collectives_share"] < 1
    assert two["efficiency"] == pytest.approx(1 / two["ratio"]["epoch"]["median"] / 2)
    assert all(each["ratio_deviation"] == 0 for each in (base, tail, small))
    page = output.with_suffix(".md").read_text()
    assert "| `train.resolution=16` |" in page and "efficiency" in page
    assert output.with_suffix(".png").stat().st_size > 3000


@pytest.mark.slow
def test_a_failed_launch_ends_the_sweep(tmp_path, capfd):
    command = ["--variant", "sample.merge_lra=true", "--base", "sample.merge_lra=false"]
    assert sweep.main([*command, "--output", str(tmp_path / "s.json"), "--", "--preset", "tiny"]) == epoch.REFUSED
    assert "config.sample.merge_lora" in capfd.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("size", [["--cpu"], []], ids=["cpu", "gpu"])
def test_run_all_passes_arguments_that_are_understood(size, tmp_path):
    environment = os.environ | {"PYTHON": sys.executable, "RESULTS": str(tmp_path / "results")}
    command = ["bash", ROOT / "benchmarks" / "run_all.sh", *size, "--dry-run"]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    assert not (tmp_path / "results").exists()
    programs = {f"{each.__name__}.py": each for each in (epoch, sweep, judge_load, compare_engines)}
    assert {line[0] for line in lines} >= {"epoch.py", "sweep.py", "compare_engines.py"}
    for name, *arguments in lines:
        split = arguments.index("--") if "--" in arguments else len(arguments)
        given, rest = programs[name].parser().parse_known_args(arguments[:split])
        assert given.output.parent == tmp_path / "results"
        for text in [given.base, *given.variant] if name == "sweep.py" else []:
            rest += sweep.Variant.parse(text).options
        if name == "sweep.py":
            rest += epoch.parser().parse_known_args(arguments[split + 1 :])[1]
        given = [text.removeprefix("--config.").split("=", 1) for text in rest if text != "--published-work"]
        assert load("t2is", *given)  # known options of the right type


def test_differences_of_two_runs():
    def outcome(loss, weight, mean=0.5):
        weights = [{"a": torch.zeros(2)}, {"a": torch.tensor([2.0, weight])}]
        return {"rewards": [{"reward/x": (mean, 0.1)}] * 2, "loss": [loss, loss], "weights": weights}

    found = compare_engines.differences(outcome(-1e-8, 0.0), outcome(1e-8, 0.002, 0.501))
    assert found == pytest.approx({"rewards": 0.01, "loss": 2e-8, "weights": 0.001}, rel=1e-3)
    assert compare_engines.differences(outcome(2.0, 0), outcome(2.2, 0))["loss"] == pytest.approx(0.1)


def test_engines_that_cannot_run_have_a_reason():
    by_name = {engine.name: engine for engine in compare_engines.engines(gpus=0)}
    assert by_name["replicated"].reason_against(0) is None
    assert compare_engines.Engine("replicated", 4).reason_against(2)


def test_medians_spread_and_ratios():
    assert report.summary([3.0, None, 1.0, 2.0]) == {"median": 2.0, "low": 1.5, "high": 2.5, "n": 3}
    assert report.summary([])["median"] is None
    found = report.ratios([2.0, 9.0, None], [1.0, 3.0, 1.0])
    assert found["raw"] == [2.0, 3.0] and found["median"] == 2.5
