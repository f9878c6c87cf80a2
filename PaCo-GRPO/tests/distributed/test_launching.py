"""The launch scripts: the arguments they pass to torchrun or accelerate, several machines."""

import os
import subprocess
from itertools import pairwise

import pytest
from tiny_run import ROOT
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import get_args_parser

SCRIPTS = ROOT / "scripts"


# Of this machine's environment, what would change what is started.
CLEAN = ("NNODES", "NODE_RANK", "MASTER_ADDR", "NUM_PROCESSES", "OMP_NUM_THREADS")
CPU = {"CUDA_VISIBLE_DEVICES": ""}
TWO = CPU | {"NUM_PROCESSES": "2"}
SECOND_MACHINE = {
    "NNODES": "2",
    "NODE_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29601",
    "NUM_PROCESSES": "3",
}


@pytest.fixture
def launch(tmp_path):
    """Run a script with an interpreter that only writes down its arguments and two variables."""

    def run(script: str, *arguments: str, **environment: str):
        python = tmp_path / "python"
        python.write_text(
            '#!/bin/sh\n[ "$1" != -P ] || exit 0  # asked which packages it has\n'
            f'printf "%s\\n" "$@" > {tmp_path}/called\n'
            f'echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" > {tmp_path}/timeout\n'
        )
        python.chmod(0o755)
        (tmp_path / "called").unlink(missing_ok=True)
        variables = {name: value for name, value in os.environ.items() if name not in CLEAN}
        variables |= {"PYTHON": str(python)} | environment
        ended = subprocess.run(
            ["bash", str(SCRIPTS / script), *arguments],
            env=variables,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        called = tmp_path / "called"
        return ended, called.read_text().splitlines() if called.exists() else None

    return run


@pytest.mark.parametrize(
    ("command", "environment", "processes", "program"),
    [
        ("launch.sh --config x", CPU, "1", "scripts/train.py --config x"),
        (
            "launch.sh scripts/evaluate.py --config x --against base",
            TWO,
            "2",
            "scripts/evaluate.py --config x --against base",
        ),
        (
            "multi_node/train_flux.sh t2is --config.seed=1",
            SECOND_MACHINE,
            "3",
            "scripts/train.py --config config/grpo.py:t2is --config.seed=1",
        ),
    ],
)
def test_what_is_started(launch, tmp_path, command, environment, processes, program):
    ended, called = launch(*command.split(), **environment)
    assert ended.returncode == 0, ended.stderr
    if processes == "1":
        assert called == program.split()
        return
    _, _, *arguments = called
    parsed = get_args_parser().parse_args(arguments)
    assert parsed.nproc_per_node == processes
    assert [parsed.training_script, *parsed.training_script_args] == program.split()
    if "NNODES" in environment:
        assert (parsed.nnodes, parsed.node_rank) == ("2", 1)
        assert (parsed.master_addr, parsed.master_port) == ("node0", 29601)


def test_processes_have_time_to_stop(launch, tmp_path, monkeypatch):
    """torchrun's 30 s are less than an update and a checkpoint take."""
    launch("launch.sh", "--config", "x", **TWO)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", (tmp_path / "timeout").read_text().strip())
    assert LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1).shutdown_timeout == 600


@pytest.mark.parametrize(
    ("stated", "environment", "expected"),
    [
        ("", CPU, ("1", None)),
        ("num_processes: 7", CPU | {"NUM_PROCESSES": "5"}, ("5", None)),
        ("distributed_type: MULTI_GPU", SECOND_MACHINE, ("6", "2")),
    ],
)
def test_a_users_configuration_of_accelerate(launch, tmp_path, stated, environment, expected):
    """It may state the processes; several machines are the script's."""
    config = tmp_path / "own.yaml"
    config.write_text(f"compute_environment: LOCAL_MACHINE\n{stated}\n")
    variables = {"ACCELERATE_CONFIG": str(config), "MASTER_PORT": "29700"} | environment
    script = "multi_node/train_flux.sh" if "NNODES" in environment else "launch.sh"
    arguments = ["t2is"] if "NNODES" in environment else ["--config", "x"]
    ended, called = launch(script, *arguments, **variables)
    assert ended.returncode == 0, ended.stderr
    values = dict(pairwise(called))
    assert (values.get("--num_processes"), values.get("--num_machines")) == expected
    assert values["--main_process_port"] == variables["MASTER_PORT"]


@pytest.mark.parametrize(
    ("command", "environment", "named"),
    [
        ("multi_node/train_flux.sh t2is", {}, "NNODES"),
        (
            "multi_node/train_flux.sh t2is",
            {"NNODES": "2", "NODE_RANK": "08", "MASTER_ADDR": "x"},
            "NODE_RANK from 0 to 1",
        ),
        ("multi_node/train_flux.sh t2is", {"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR"),
        ("launch.sh scripts/evalute.py --config x", CPU, "scripts/evalute.py"),
    ],
)
def test_what_is_missing_is_named(launch, command, environment, named):
    ended, called = launch(*command.split(), **environment)
    assert ended.returncode != 0 and named in ended.stderr and called is None


@pytest.mark.parametrize(
    ("command", "source", "expected"),
    [
        ("single_node/train_flux.sh {}", "own/runs.py:mine", "{}/own/runs.py:mine"),
        ("launch.sh scripts/evaluate.py --config {}", "own/runs.py", "{}/own/runs.py"),
        ("launch.sh scripts/generate.py --config {}", "config/grpo.py:t2is", "config/grpo.py:t2is"),
    ],
)
def test_a_configuration_file_is_found_from_where_the_command_is_typed(
    launch, tmp_path, monkeypatch, command, source, expected
):
    (tmp_path / "own").mkdir()
    for name in ("runs.py", "config.yaml"):
        (tmp_path / "own" / name).touch()
    monkeypatch.chdir(tmp_path)
    ended, called = launch(*command.format(source).split(), **CPU)
    assert ended.returncode == 0, ended.stderr
    assert dict(pairwise(called))["--config"] == expected.format(tmp_path)
