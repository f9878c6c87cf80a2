"""The shell scripts: their --help, and a Slurm job whose programs only note how they were called."""

import os
import re
import subprocess

import pytest
from serving_tools import REPO, ROOT

SCRIPTS = [*ROOT.glob("scripts/**/*.sh"), *ROOT.glob("vllm_server/*.sh")]
SCRIPTS += REPO.glob("PaCo-Reward/train/*.sh")


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.name for script in SCRIPTS])
def test_help_is_the_comment_at_the_top(script):
    """Without any Python: nothing need be installed."""
    environment = {"PATH": os.environ["PATH"], "PYTHON": "/nowhere"}
    command = ["bash", str(script), "--help"]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    comment = re.match(r"#!.*\n((?:#.*\n)+)", script.read_text()).group(1)
    assert printed.stdout == re.sub("^# ?", "", comment, flags=re.MULTILINE)


NOTE = """#!/usr/bin/env bash
[[ "$1" != -P ]] || exit 0
echo "$(basename "$0") $*|$CUDA_VISIBLE_DEVICES|$VLLM_LABEL|$VLLM_API_KEY|$NODE_RANK" >>"$RECORD"
"""
SRUN = r"""#!/usr/bin/env bash
echo "srun $*||||" >>"$RECORD"
while [[ "$1" == --* ]]; do shift; done
for ((node = 0; node < SLURM_NNODES; node++)); do
  SLURM_NODEID=$node CUDA_VISIBLE_DEVICES=0,1,2,3 "$@" || exit
done
"""
PROGRAMS = {
    "PaCo-GRPO/vllm_server/launch.sh": NOTE,
    "PaCo-GRPO/vllm_server/stop.sh": NOTE,
    "bin/python": NOTE,
    "bin/srun": SRUN,
    "bin/scontrol": "#!/bin/sh\nprintf 'node07\\nnode08\\n'\n",
}


@pytest.mark.parametrize(
    ("num_nodes", "judge_gpus", "training_gpus"),
    [("1", "0", ["1,2,3"]), ("2", "0", ["1,2,3", "0,1,2,3"]), ("1", "2,0", ["1,3"])],
)
def test_a_slurm_job(tmp_path, num_nodes, judge_gpus, training_gpus):
    """Of ``t2is``, in a clone whose programs take notes; all nodes are this machine."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "PaCo-GRPO" / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / "tools").symlink_to(REPO / "tools")
    environment = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "PYTHON": f"{tmp_path}/bin/python",
        "RECORD": f"{tmp_path}/record",
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": "node[07-08]",
        "SLURM_NNODES": num_nodes,
        "SLURM_SUBMIT_DIR": f"{tmp_path}/PaCo-GRPO",
        "JUDGE_GPUS": judge_gpus,
    }
    command = ["bash", str(ROOT / "scripts" / "slurm" / "train.sh"), "t2is", "--config.seed=1"]
    subprocess.run(command, env=environment, cwd="/", timeout=60, check=True)
    calls = [line.split("|") for line in (tmp_path / "record").read_text().splitlines()]
    judge, (srun, *_), *nodes, stop = calls
    key = judge[3]
    assert judge == ["launch.sh ", judge_gpus, "slurm-42", key, ""]
    assert len(key) == 32
    assert "--ntasks-per-node=1" in srun
    assert (stop[0], stop[2]) == ("stop.sh ", "slurm-42")
    trainings = [call for call in nodes if "train.py" in call[0]]
    assert [call[1] for call in trainings] == training_gpus
    words = ["t2is", "--config.seed=1", "consistency_score.base_url=http://node07:8000"]
    if num_nodes == "2":
        words += ["--nnodes 2", "--master-addr node07"]
    for rank, (command, *_, node_key, node_rank) in enumerate(trainings):
        assert [word for word in words if word not in command] == []
        assert (node_key, node_rank) == (key, str(rank))
    assert not any(key in call[0] for call in calls)  # others see command lines
