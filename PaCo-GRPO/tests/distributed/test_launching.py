"""The launch scripts: the arguments they pass to torchrun or accelerate, several machines."""

import os
import subprocess
from itertools import pairwise

import pytest
from tiny_run import ROOT
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
    """Run a script with an interpreter that only writes down how it was called.

    Returns the exit status, errors and arguments. The interpreter has the pid of the script:
    otherwise a signal to it would not reach the training.
    """

    def run(script: str, *arguments: str, **environment: str):
        python = tmp_path / "python"
        called = tmp_path / "called"
        python.write_text(
            '#!/bin/sh\n[ "$1" != -P ] || exit 0  # asked which packages it has\n'
            f'printf "%s\\n" "$$" "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" "$@" > {called}\n'
        )
        python.chmod(0o755)
        variables = {name: value for name, value in os.environ.items() if name not in CLEAN}
        process = subprocess.Popen(
            ["bash", str(SCRIPTS / script), *arguments],
            env=variables | {"PYTHON": str(python)} | environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
        if not called.exists():
            return process.returncode, errors, None
        pid, timeout, *words = called.read_text().splitlines()
        assert (int(pid), timeout) == (process.pid, "600"), errors  # torchrun's 30 s are too few
        return process.returncode, errors, words

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
def test_what_is_started(launch, command, environment, processes, program):
    status, errors, called = launch(*command.split(), **environment)
    assert status == 0, errors
    if processes == "1":
        assert called == program.split()
        return
    parsed = get_args_parser().parse_args(called[2:])
    assert parsed.nproc_per_node == processes
    assert [parsed.training_script, *parsed.training_script_args] == program.split()
    if "NNODES" in environment:
        assert (parsed.nnodes, parsed.node_rank) == ("2", 1)
        assert (parsed.master_addr, parsed.master_port) == ("node0", 29601)


@pytest.mark.parametrize(
    ("stated", "environment", "expected"),
    [
        ("", CPU, ("1", None)),
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
    status, errors, called = launch(script, *arguments, **variables)
    assert status == 0, errors
    values = dict(pairwise(called))
    assert (values.get("--num_processes"), values.get("--num_machines")) == expected
    assert values["--main_process_port"] == variables["MASTER_PORT"]


@pytest.mark.parametrize("lacks", ["NNODES", "NODE_RANK", "MASTER_ADDR"])
def test_what_is_missing_is_named(launch, lacks):
    environment = {name: value for name, value in SECOND_MACHINE.items() if name != lacks}
    status, errors, called = launch("multi_node/train_flux.sh", "t2is", **environment)
    assert status != 0 and lacks in errors and called is None


@pytest.mark.parametrize(
    ("command", "source", "expected"),
    [
        ("single_node/train_flux.sh {}", "own/runs.py:mine", "{}/own/runs.py:mine"),
        ("launch.sh scripts/generate.py --config {}", "config/grpo.py:t2is", "config/grpo.py:t2is"),
    ],
)
def test_a_configuration_file_is_found_from_where_the_command_is_typed(
    launch, tmp_path, monkeypatch, command, source, expected
):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "runs.py").touch()
    monkeypatch.chdir(tmp_path)
    status, errors, called = launch(*command.format(source).split(), **CPU)
    assert status == 0, errors
    assert dict(pairwise(called))["--config"] == expected.format(tmp_path)
