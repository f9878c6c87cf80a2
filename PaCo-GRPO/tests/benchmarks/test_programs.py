"""The sweep, scaling, tables and the one command, at tiny size."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paco_grpo.training.configuration import load_config

import compare_engines
import effects
import environment as surroundings
import epoch
import resolution_sweep
import scaling
import tables
from measuring import machine
from measuring.options import names
from measuring.repeats import ratios, summary
from measuring.turns import comparisons

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--preset", "tiny", "--k", "2", "--m", "1", "--steps", "2", "--batch", "2", "--train-batch", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Reports of the sweep and of one epoch."""
    made = tmp_path_factory.mktemp("machine")
    command = [*TINY, "--resolutions", "16", "32", "--repeats", "1", "--warmup", "0", "--counted", "flux-small"]
    assert resolution_sweep.main([*command, "--text", "64", "--output", str(made / "resolution_sweep.json")]) == 0
    command = [*TINY, "--repeats", "1", "--warmup", "0", "--compare", "sample.same_latent=off,on"]
    assert epoch.main([*command, "--output", str(made / "epoch-tiny.json")]) == 0
    return made


@pytest.mark.slow
def test_the_sweep_gives_cost_by_resolution(folder):
    report = json.loads((folder / "resolution_sweep.json").read_text())
    small, large = report["measured"]
    assert [row["image_tokens"] for row in report["measured"]] == [4, 16]
    assert (small["text_tokens"], small["text_share"], large["text_share"]) == (32, 32 / 36, 32 / 48)
    assert large["sampling_flops"] > small["sampling_flops"] > 0 and large["training_flops"] > 0
    for row in report["measured"]:
        assert row["sampling_seconds"]["median"] > 0 and row["training_seconds"]["median"] > 0
        assert len(row["epochs"]) == 1
    assert [row["image_tokens"] for row in report["counted"]] == [1, 4]
    assert report["counted"][1]["forward"] > report["counted"][0]["forward"]


@pytest.mark.slow
def test_tables_and_plots_of_a_folder(folder, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- results -->\nold\n<!-- /results -->\nafter\n")
    for _ in range(2):  # a second time changes nothing
        assert tables.main([str(folder), "--readme", str(readme)]) == 0
        text = readme.read_text()
        assert text.startswith("before\n<!-- results -->\n") and text.endswith("<!-- /results -->\nafter\n")
    assert "old" not in text and text.count(f"### {folder.name}\n") == 1
    assert "| `sample.same_latent=on` to `sample.same_latent=off` |" in text
    assert "Counted, not timed: FLOPs of an image with flux-small's real architecture." in text
    for name in ("epoch-tiny", "resolution_sweep"):
        assert (folder / f"{name}.png").stat().st_size > 3000
        assert (
            tmp_path / os.path.relpath(folder / f"{name}.json", tmp_path)
        ).is_file() and f"<summary>{name}</summary>" in text
    assert (folder / "tables.md").is_file()


@pytest.mark.slow
def test_tables_refuse_what_they_cannot_read(folder, tmp_path, capsys):
    assert tables.main([str(tmp_path)]) == 2
    (tmp_path / "broken.json").write_text("{")
    assert tables.main([str(tmp_path)]) == 2
    (tmp_path / "broken.json").unlink()
    (tmp_path / "README.md").write_text("no markers")
    assert tables.main([str(folder), "--readme", str(tmp_path / "README.md")]) == 2
    said = capsys.readouterr().err
    assert "no report" in said and "measure again" in said and "<!-- results -->" in said


@pytest.mark.long
def test_scaling_over_two_processes(tmp_path):
    output = tmp_path / "scaling.json"
    command = ["--processes", "1", "2", "--rounds", "1", "--repeats", "1", "--output", str(output), "--"]
    assert scaling.main([*command, *TINY, "--m", "2", "--warmup", "0"]) == 0
    one, two = json.loads(output.read_text())["rows"]
    assert one["speedup"]["median"] == one["efficiency"] == 1.0
    assert two["efficiency"] == pytest.approx(two["speedup"]["median"] / 2)
    assert one["images"] == two["images"] == 4 and one["calls"]["transformer"] == two["calls"]["transformer"]
    assert one["waiting_share"]["median"] == 0 < two["waiting_share"]["median"] < 1
    assert len(two["raw"][0][0]) == 2  # processes
    assert tables.main([str(tmp_path)]) == 0 and (tmp_path / "scaling.png").is_file()


@pytest.mark.slow
def test_effects_of_a_setting(tiny_flux_dir, tmp_path):
    from tiny_run import write_prompts

    output = tmp_path / "effects.json"
    command = ["--config", f"{ROOT}/config/grpo.py:toy_t2is", f"--config.pretrained.model={tiny_flux_dir}", "--images", "2",
               f"--config.dataset={write_prompts(tmp_path / 'prompts')}", "--config.train.resolution=16", "--rounds", "1",
               "--config.max_sequence_length=16", "--config.sample.num_steps=4", "--output", str(output)]  # fmt: skip
    settings = ["sample.tail_steps=1", "sample.tail_weights=int8", "sample.merge_lora=false", "speed.attention=native"]
    assert effects.main([*command, *(part for text in settings for part in ("--setting", text))]) == 0
    rows = {row["setting"]: row for row in json.loads(output.read_text())["rows"]}
    assert list(rows) == ["plain", *settings]
    assert (
        rows["plain"]["time_ratio"] == 1
        and rows["plain"]["pixel_rms"] == rows["speed.attention=native"]["pixel_rms"] == 0
    )
    assert rows["sample.tail_steps=1"]["pixel_rms"] > 0 and rows["sample.tail_weights=int8"]["pixel_rms"] > 0
    assert all(row["ratio_deviation"] == 0 for row in rows.values())
    assert tables.main([str(tmp_path)]) == 0 and (tmp_path / "effects.png").is_file()
    assert "| `sample.tail_weights=int8` |" in (tmp_path / "tables.md").read_text()


@pytest.mark.slow
def test_launches_with_other_environments_take_turns(tmp_path):
    output = tmp_path / "environment.json"
    command = ["--rounds", "1", "--repeats", "1", "--output", str(output), "--setting"]
    assert (
        surroundings.main(
            [*command, "OMP_NUM_THREADS=1", "--setting", "OMP_NUM_THREADS=2 A=b", "--", *TINY, "--warmup", "0"]
        )
        == 0
    )
    report = json.loads(output.read_text())
    assert [row["setting"] for row in report["rows"]] == ["OMP_NUM_THREADS=1", "OMP_NUM_THREADS=2 A=b"]
    assert report["rows"][0]["ratio"]["epoch"]["raw"] == [1.0] and report["rows"][1]["seconds"]["epoch"]["median"] > 0
    assert report["settings"]["epoch"][:2] == TINY[:2]
    assert tables.main([str(tmp_path)]) == 0 and (tmp_path / "environment.png").is_file()
    assert "| `OMP_NUM_THREADS=2 A=b` |" in (tmp_path / "tables.md").read_text()


def test_variables_are_set_and_taken_away(capsys):
    given = surroundings.variables("A=1 B= C=x=y")
    assert surroundings.environment({"B": "2", "D": "3"}, given) == {"A": "1", "C": "x=y", "D": "3"}
    assert surroundings.main(["--setting", "threads"]) == 2 and "'threads' is not NAME=VALUE" in capsys.readouterr().err


def test_engines_are_compared_at_the_scale_of_what_differs(tmp_path):
    def outcome(loss, weight, advantages):
        after = {"a": torch.tensor([1.0, 3.0 + weight])}
        return {"advantages": [advantages], "loss": [loss], "weights": [{"a": torch.tensor([1.0, 1.0])}, after]}

    one, two = outcome(-1e-8, 0.0, [1.0, -1.0, None]), outcome(1e-8, 0.002, [1.001, -1.0, None])
    found = compare_engines.differences(one, two)
    # a loss that is 0 but for rounding is no reason; the weights went 2 in the second epoch
    assert found == pytest.approx({"advantages": 0.001, "loss": 2e-8, "weights": 0.001}, rel=1e-3)
    assert compare_engines.differences(outcome(2.0, 0, [1.0]), outcome(2.2, 0, [1.0]))["loss"] == pytest.approx(0.1)
    assert set(compare_engines.differences(one, outcome(0, 0, [1.0, None, None])).values()) == {float("inf")}
    rows = [{"objective": "ppo", "engine": "fsdp2-2", "ran": True, "agrees": True, "differences": found},
            {"objective": "ppo", "engine": "zero3-2", "ran": False, "agrees": None, "not_run": "not driven"}]  # fmt: skip
    report = machine.report("compare_engines", {"tolerances": compare_engines.TOLERANCES}, rows=rows)
    machine.write(tmp_path / "compare_engines.json", report)
    assert tables.main([str(tmp_path)]) == 0
    page = (tmp_path / "tables.md").read_text()
    assert "| ppo | fsdp2-2 | 1.0e-03 | 2.0e-08 | 1.0e-03 | agrees |" in page and "| – | – | – | not driven |" in page


def test_medians_spread_and_ratios():
    assert summary([3.0, None, 1.0, 2.0]) == {"median": 2.0, "low": 1.5, "high": 2.5, "n": 3}
    assert summary([])["median"] is None
    found = ratios([2.0, 9.0, None], [1.0, 3.0, 1.0])
    assert found["raw"] == [2.0, 3.0] and found["median"] == 2.5


@pytest.mark.slow
@pytest.mark.parametrize("size", [["--cpu"], []], ids=["cpu", "gpu"])
def test_the_one_command_gives_arguments_that_are_understood(size, tmp_path):
    environment = os.environ | {"PYTHON": sys.executable, "RESULTS": str(tmp_path / "results")}
    command = ["bash", ROOT / "benchmarks" / "run_all.sh", *size, "--dry-run"]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    lines = [shlex.split(line) for line in done.stdout.splitlines() if line.split(" ")[0].endswith(".py")]
    assert len(lines) >= 5 and not (tmp_path / "results").exists()
    programs = {
        "epoch.py": epoch,
        "resolution_sweep.py": resolution_sweep,
        "scaling.py": scaling,
        "environment.py": surroundings,
    }
    options = set(names(load_config(f"{ROOT}/config/grpo.py:t2is", ROOT / "config" / "base.py")))
    assert {line[0] for line in lines} >= {*programs, "compare_engines.py"}
    for program, *arguments in lines:
        if program == "compare_engines.py":
            assert (
                compare_engines.parser().parse_args(arguments).output == tmp_path / "results" / "compare_engines.json"
            )
            continue
        if program == "effects.py":
            given, rest = effects.parser().parse_known_args(arguments)
            assert given.output == tmp_path / "results" / "effects-toy.json" and rest[0] == "--config"
            assert {option for text in given.setting for option in re.findall(r"([a-z_.]+)=", text)} <= options
            continue
        if "--" in arguments:
            cut = arguments.index("--")
            given = programs[program].parser().parse_args(arguments[:cut])
            assert given.output.parent == tmp_path / "results"  # where the command looks for it
            for setting in getattr(given, "setting", []):
                assert surroundings.variables(setting)
            program, arguments = "epoch.py", ["--output", str(given.output), *arguments[cut + 1 :]]
        given, rest = programs[program].parser().parse_known_args(arguments)
        assert given.output.parent == tmp_path / "results"
        work = epoch.work_of(given).resolved()
        comparisons(getattr(given, "compare", []), work)
        assert all(key for key, _ in epoch.overrides_of(rest))
    assert any("work=published,ours" in line for line in lines)


def test_help_teaches(capsys):
    for program in (compare_engines, effects, epoch, resolution_sweep, scaling, surroundings, tables):
        with pytest.raises(SystemExit):
            program.parser().parse_args(["--help"])
        assert "python benchmarks/" in capsys.readouterr().out
