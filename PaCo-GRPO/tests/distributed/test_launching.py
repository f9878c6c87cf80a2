"""The launch scripts: the arguments they pass to torchrun or accelerate, several machines."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from fakes import free_port
from tiny_run import ROOT, as_arguments, overrides_for
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import get_args_parser

from paco_grpo.evaluation.pictures import read_rows

SCRIPTS = ROOT / "scripts"


def launch(
    tmp_path: Path, script: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess:
    """Run a script with an interpreter that only records how it was called."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\n[ "$1" != -P ] || exit 0  # asked which packages it has\n'
        f'printf "%s\\n" "$@" > {tmp_path}/called\n'
        f'echo "$ACCELERATE_USE_CPU" >> {tmp_path}/called\n'
        f'echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" > {tmp_path}/timeout\n'
    )
    python.chmod(0o755)
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in ("NNODES", "NODE_RANK", "MASTER_ADDR", "NUM_PROCESSES")
    }
    return subprocess.run(
        ["bash", str(SCRIPTS / script), *arguments],
        env=clean | {"PYTHON": str(python)} | environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def called(tmp_path: Path) -> list[str]:
    return (tmp_path / "called").read_text().splitlines()


def test_processes_have_time_to_stop(tmp_path, monkeypatch):
    """torchrun's 30 s are less than an update and a checkpoint take; that torch reads the variable
    is checked too.
    """
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    assert (
        launch(
            tmp_path, "launch.sh", "--config", "x", NUM_PROCESSES="2", CUDA_VISIBLE_DEVICES=""
        ).returncode
        == 0
    )
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", (tmp_path / "timeout").read_text().strip())
    assert LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1).shutdown_timeout == 600


def test_compilers_share_the_cores(tmp_path, monkeypatch):
    """torch's default is up to 32 processes that compile, in each process."""
    # As the real one, it counts the threads of OMP_NUM_THREADS.
    (tmp_path / "nproc").write_text("#!/bin/sh\necho ${OMP_NUM_THREADS:-64}\n")
    (tmp_path / "nproc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    for processes, variables, threads in (
        ("4", {}, "8"),
        ("4", {"OMP_NUM_THREADS": "1"}, "8"),
        ("16", {}, "4"),
        ("16", {"TORCHINDUCTOR_COMPILE_THREADS": "1"}, "1"),
    ):
        variables = {"NUM_PROCESSES": processes, "CUDA_VISIBLE_DEVICES": ""} | variables
        ended = launch(tmp_path, "launch.sh", "--config", "x", **variables)
        assert ended.returncode == 0, ended.stderr
        assert f"TORCHINDUCTOR_COMPILE_THREADS={threads}," in ended.stderr
        num_threads = variables.get("OMP_NUM_THREADS", 64 // int(processes))
        assert f"OMP_NUM_THREADS={num_threads}," in ended.stderr


def test_several_machines_reach_the_launcher(tmp_path):
    machines = {
        "NNODES": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29601",
        "NUM_PROCESSES": "3",
    }
    assert (
        launch(
            tmp_path, "multi_node/train_flux.sh", "t2is", "--config.seed=1", **machines
        ).returncode
        == 0
    )
    _module, _torchrun, *arguments, _cpu = called(tmp_path)
    read = get_args_parser().parse_args(arguments)
    assert (read.nnodes, read.node_rank, read.nproc_per_node) == ("2", 1, "3")
    assert (read.master_addr, read.master_port) == ("node0", 29601)
    assert read.training_script_args == ["--config", "config/grpo.py:t2is", "--config.seed=1"]
    config = tmp_path / "own.yaml"
    config.write_text("distributed_type: MULTI_GPU\n")
    assert (
        launch(
            tmp_path, "multi_node/train_flux.sh", "t2is", ACCELERATE_CONFIG=str(config), **machines
        ).returncode
        == 0
    )
    _module, _accelerate, *arguments, _cpu = called(tmp_path)
    read = launch_command_parser().parse_args(arguments)
    assert (read.num_machines, read.machine_rank, read.num_processes, read.main_process_port) == (
        2,
        1,
        6,
        29601,
    )


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({}, "NNODES"),
        ({"NNODES": "2", "NODE_RANK": "08", "MASTER_ADDR": "x"}, "NODE_RANK from 0 to 1"),
        ({"NNODES": "1", "NUM_PROCESSES": "18446744073709551617"}, "NUM_PROCESSES="),
        ({"NNODES": "1", "MASTER_PORT": "x"}, "MASTER_PORT=x"),
        ({"NNODES": "1", "ACCELERATE_CONFIG": "/no/such.yaml"}, "ACCELERATE_CONFIG=/no/such.yaml"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR"),
    ],
)
def test_missing_setting_of_several_machines_is_named(tmp_path, environment, named):
    ended = launch(tmp_path, "multi_node/train_flux.sh", "t2is", **environment)
    assert ended.returncode != 0 and named in ended.stderr
    assert not (tmp_path / "called").exists()


def test_a_users_configuration_may_state_its_processes(tmp_path):
    config = tmp_path / "own.yaml"
    for stated, given, expected in (
        ("", "", ["1"]),
        ("num_processes: 7\n", "", []),
        ("num_processes: 7\n", "5", ["5"]),
    ):
        config.write_text("compute_environment: LOCAL_MACHINE\n" + stated)
        environment = {"ACCELERATE_CONFIG": str(config), "MASTER_PORT": "29700"} | (
            {"NUM_PROCESSES": given} if given else {}
        )
        ended = launch(
            tmp_path, "launch.sh", "--config", "x", CUDA_VISIBLE_DEVICES="", **environment
        )
        assert ended.returncode == 0, ended.stderr
        arguments = called(tmp_path)
        assert [
            after for name, after in pairwise(arguments) if name == "--num_processes"
        ] == expected
        assert arguments[arguments.index("--main_process_port") + 1] == "29700"


@pytest.mark.parametrize(
    "command",
    [
        ("single_node/train_flux.sh", "{}"),
        ("single_node/train_qwenimage_edit.sh", "{}"),
        ("launch.sh", "scripts/evaluate.py", "--config={}"),
        ("launch.sh", "scripts/generate.py", "--config", "{}", "--output", "own/runs.py"),
    ],
)
def test_a_configuration_file_is_found_from_where_the_command_is_typed(
    command, tmp_path, monkeypatch
):
    own = tmp_path / "own"
    own.mkdir()
    for name in ("runs.py", "config.yaml"):
        (own / name).touch()
    monkeypatch.chdir(tmp_path)
    script, *arguments = command
    for source, expected in (
        ("own/runs.py:mine", f"{tmp_path}/own/runs.py:mine"),
        ("own/runs.py", f"{tmp_path}/own/runs.py"),
        ("own/config.yaml", f"{tmp_path}/own/config.yaml"),
        (f"{own}/runs.py:mine", f"{own}/runs.py:mine"),
        ("config/grpo.py:t2is", "config/grpo.py:t2is"),  # of PaCo-GRPO
    ):
        words = [argument.format(source) for argument in arguments]
        ended = launch(tmp_path, script, *words, CUDA_VISIBLE_DEVICES="")
        assert ended.returncode == 0, ended.stderr
        line = " ".join(called(tmp_path))
        assert f"--config {expected}" in line or f"--config={expected}" in line
        assert "--output" not in line or "--output own/runs.py" in line


def test_another_program_starts_in_as_many_processes(tmp_path):
    arguments = ["--config", "x", "--against", "base"]
    processes = {"NUM_PROCESSES": "2", "CUDA_VISIBLE_DEVICES": ""}
    ended = launch(tmp_path, "launch.sh", "scripts/evaluate.py", *arguments, **processes)
    assert ended.returncode == 0, ended.stderr
    _module, _torchrun, *command, _cpu = called(tmp_path)
    parsed = get_args_parser().parse_args(command)
    assert parsed.nproc_per_node == "2"
    assert parsed.training_script == "scripts/evaluate.py"
    assert parsed.training_script_args == arguments


def test_a_program_that_does_not_exist_is_named(tmp_path):
    ended = launch(tmp_path, "launch.sh", "scripts/evalute.py", "--config", "x")
    assert ended.returncode == 2
    assert "no program scripts/evalute.py" in ended.stderr


@pytest.mark.long
def test_two_processes_evaluate_as_the_run_did(trained_run, tmp_path):
    checkpoint = trained_run.folder / "checkpoints" / "epoch_0002"
    script = ["bash", str(SCRIPTS / "launch.sh"), "scripts/evaluate.py"]
    config = ["--config", str(trained_run.folder / "saved.yaml")]
    adapter = ["--adapter", str(checkpoint), "--output", str(tmp_path)]
    environment = {
        "PYTHON": sys.executable,
        "NUM_PROCESSES": "2",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT / "tests"),
    }
    subprocess.run([*script, *config, *adapter], env=os.environ | environment, check=True)
    evaluated = read_rows(tmp_path)
    expected = read_rows(trained_run.folder / "eval" / "epoch_0002")
    assert [row["seed"] for row in evaluated] == [row["seed"] for row in expected]
    for row, reference in zip(evaluated, expected, strict=True):
        assert row["rewards"] == pytest.approx(reference["rewards"], abs=0.1)


@pytest.mark.long
def test_two_machines_over_loopback_train_together(tiny_flux_dir, tmp_path):
    """Two launches of one process each on this machine, with gloo in place of nccl."""
    options = as_arguments(overrides_for(tiny_flux_dir, tmp_path))
    command = ["bash", str(SCRIPTS / "multi_node" / "train_flux.sh"), "toy_t2is", *options]
    shared = {
        "PYTHON": sys.executable,
        "NNODES": "2",
        "NUM_PROCESSES": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "tests"),
    }
    machines = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"NODE_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [machine.communicate(timeout=550)[1] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [0, 0], errors
    run = tmp_path / "runs" / "run"
    assert json.loads((run / "plan.json").read_text())["num_processes"] == 2
    epochs = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in epochs if row["phase"] == "train"] == [1, 2]
