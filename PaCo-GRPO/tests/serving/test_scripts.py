"""The shell scripts: their --help, and a Slurm job.

The job's programs only record how they were called.
"""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from serving_tools import REPO, ROOT, wait_for

from paco_grpo.rewards.judge import ServerReward

SCRIPTS = sorted(
    [
        *ROOT.glob("scripts/**/*.sh"),
        *ROOT.glob("vllm_server/*.sh"),
        *REPO.glob("PaCo-Reward/train/*.sh"),
    ]
)


@pytest.mark.parametrize("script", SCRIPTS, ids=[str(s.relative_to(REPO)) for s in SCRIPTS])
def test_help_is_the_comment_at_the_top(script):
    """Without any Python: nothing need be installed."""
    environment = {"PATH": os.environ["PATH"], "PYTHON": "/nowhere"}
    done = subprocess.run(
        ["bash", str(script), "--help"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and not done.stderr
    first, *rest = done.stdout.splitlines()
    assert f"# {first}" == script.read_text().splitlines()[1]
    assert script.name in done.stdout or script.name == "node.sh"
    assert rest and not any(line.startswith(("#", "set ")) for line in rest)


def test_launch_help_lists_every_variable():
    from vllm_server.settings import LaunchSettings

    text = (ROOT / "vllm_server" / "launch.sh").read_text()
    for field in LaunchSettings.model_fields.values():
        if field.alias != "VLLM_LORA":
            assert field.alias in text
    readme = (ROOT / "vllm_server" / "README.md").read_text()
    on_the_page = set(re.findall(r"VLLM_[A-Z_]+", readme))
    assert "VLLM_REPLICAS" in on_the_page
    assert on_the_page <= set(re.findall(r"VLLM_[A-Z_]+", text))


_RECORD = """#!/usr/bin/env bash
{
  echo "$0 $*"
  env | grep -E '^(CUDA|NNODES|NODE_RANK|MASTER|VLLM_|SLURM_NODEID)' | sort
  echo
} >> "$RECORD"
"""
_SRUN = r"""#!/usr/bin/env bash
printf 'srun %s\n\n' "$*" >> "$RECORD"
while [[ "$1" == --* ]]; do shift; done
[[ -z "${HANG:-}" ]] || { sleep 60 & wait $!; }
for ((node = 0; node < SLURM_NNODES; node++)); do
  SLURM_NODEID=$node CUDA_VISIBLE_DEVICES=0,1,2,3 "$@" || exit
done
"""


class Cluster:
    """A clone whose server and interpreter only record their calls.

    Its Slurm runs all nodes on this machine.
    """

    def __init__(self, folder: Path):
        self.record = folder / "record"
        grpo = folder / "PaCo-GRPO"
        (grpo / "vllm_server").mkdir(parents=True)
        for name in ("launch.sh", "stop.sh"):
            (grpo / "vllm_server" / name).write_text(_RECORD)
        (grpo / "scripts").symlink_to(ROOT / "scripts")
        (folder / "tools").symlink_to(REPO / "tools")
        programs = folder / "bin"
        programs.mkdir()
        (programs / "srun").write_text(_SRUN)
        (programs / "scontrol").write_text("#!/bin/sh\nprintf 'node07\\nnode08\\n'\n")
        asks_packages = '[[ "$1" != -P ]] || exit 0\n'
        (programs / "python").write_text("#!/usr/bin/env bash\n" + asks_packages + _RECORD)
        for program in programs.iterdir():
            program.chmod(0o755)
        self.grpo = grpo
        self.environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "42",
            "SLURM_JOB_NODELIST": "node[07-08]",
            "SLURM_SUBMIT_DIR": str(grpo),
            "RECORD": str(self.record),
            "PYTHON": str(programs / "python"),
        }

    def start(self, *arguments: str, nodes: int = 1, **variables: str) -> subprocess.Popen:
        job = self.grpo.parent / "slurm_script"  # Slurm runs a copy
        job.write_text((ROOT / "scripts" / "slurm" / "train.sh").read_text())
        environment = self.environment | {"SLURM_NNODES": str(nodes)} | variables
        return subprocess.Popen(["bash", str(job), *arguments], env=environment, cwd="/")

    def calls(self) -> list[tuple[str, dict[str, str]]]:
        """Command line and variables of each call."""
        calls = []
        for block in self.record.read_text().split("\n\n"):
            command, *lines = block.strip().splitlines() or [""]
            calls.append((command, dict(line.split("=", 1) for line in lines if "=" in line)))
        return [call for call in calls if call[0]]


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_slurm_job(cluster, nodes):
    python = cluster.grpo.parent / "python"
    python.write_text(
        '#!/usr/bin/env bash\n[[ "$1" != -P ]] || exit 0\n' + _RECORD.partition("\n")[2]
    )
    python.chmod(0o755)
    job = cluster.start("t2is", "--config.seed=1", nodes=nodes, PYTHON=str(python))
    assert job.wait(timeout=60) == 0
    judge, srun, *trainings, stop = cluster.calls()
    assert judge[0].startswith("vllm_server/launch.sh") and stop[0].startswith(
        "vllm_server/stop.sh"
    )
    assert judge[1]["CUDA_VISIBLE_DEVICES"] == "0" and judge[1]["VLLM_HOST"] == "0.0.0.0"
    assert judge[1]["VLLM_LABEL"] == stop[1]["VLLM_LABEL"] == "slurm-42"
    key = judge[1]["VLLM_API_KEY"]
    assert len(key) == 32
    assert srun[0].startswith(
        "srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash scripts/slurm/node.sh t2is"
    )
    trainings = [training for training in trainings if "train.py" in training[0]]
    assert len(trainings) == nodes
    for rank, (command, variables) in enumerate(trainings):
        assert command.endswith(
            "scripts/train.py --config config/grpo.py:t2is --config.seed=1 "
            "--config.train.reward_fn_kwargs.consistency_score.base_url=http://node07:8000"
        )
        assert variables["CUDA_VISIBLE_DEVICES"] == ("1,2,3" if rank == 0 else "0,1,2,3")
        assert (variables["NNODES"], variables["NODE_RANK"]) == (str(nodes), str(rank))
        assert variables["MASTER_ADDR"] == "node07" and variables["VLLM_API_KEY"] == key
        assert nodes == 1 or f"--nnodes 2 --node-rank {rank} --master-addr node07" in command
    assert not any(key in command for command, _ in cluster.calls()), "others see command lines"


def test_a_slurm_job_that_is_cancelled_ends_its_judge(cluster):
    job = cluster.start("t2is", HANG="1")
    wait_for(lambda: cluster.record.exists() and "srun" in cluster.record.read_text())
    time.sleep(0.2)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=30) == 143
    assert "vllm_server/stop.sh" in cluster.record.read_text()


def test_a_judge_that_does_not_start_ends_a_slurm_job(cluster):
    (cluster.grpo / "vllm_server" / "launch.sh").write_text("exit 1\n")
    assert cluster.start("t2is").wait(timeout=30) == 1
    assert "srun" not in cluster.record.read_text()


def test_rewards_send_the_key_of_their_environment(monkeypatch):
    """Options are saved in config.yaml and shown in process lists."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert "Bearer secret" in ServerReward().client._headers.values()
    assert "Bearer other" in ServerReward(api_key="other").client._headers.values()
    monkeypatch.delenv("VLLM_API_KEY")
    assert "secret" not in str(ServerReward().client._headers)
