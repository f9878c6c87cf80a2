"""run.sh on a stand-in repository: stages are skipped when they are done, and everything it started is ended."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

REPO = Path(__file__).resolve().parents[2]
# In the places of the real commands, these note that they were called and write what those write.
NOTE = 'echo "$(basename "$0") $*" >> "$STATE/calls"\n'
PYTHON = r"""
[ "$2" = paco_toy.progress ] && exec "$REAL" "$@"
echo "python $*" >> "$STATE/calls"
out="$STATE/quickstart/out"
case "$*" in
  *print_eval_table*) echo table > $out/rank_table.txt ;;
  *paco_toy.summary*) echo "the table" > $out/summary.txt ;;
esac
"""
FAIL_OR_HANG = r"""
[ -n "$FAIL" ] && { echo "error: judge went away" >&2; exit 3; }
[ -n "$HANG" ] && { touch "$STATE/hanging"; sleep 300; }
exit 0
"""
RL = NOTE + FAIL_OR_HANG
ORDER = ["build_world", "--sets_only", "annotate", "--rankings", "finish", "accuracy", "paco_reward.sh", "accuracy", "export",
         "eval_vllm", "histogram", "print_eval_table", "stop.sh", "launch.sh", "train_flux.sh", "stop.sh", "paco_toy.summary",
         "paco_grpo.report", "stop.sh"]  # fmt: skip
COMMANDS = {
    "setup.sh": "",
    ".venv/bin/python": PYTHON,
    ".venv/bin/paco-reward": NOTE,
    "PaCo-Reward/train/paco_reward.sh": NOTE,
    "PaCo-GRPO/vllm_server/launch.sh": 'echo "launch.sh $VLLM_PORT" >> "$STATE/calls"; touch "$STATE/serving"',
    "PaCo-GRPO/vllm_server/stop.sh": NOTE + 'rm -f "$STATE/serving"',
    "PaCo-GRPO/scripts/single_node/train_flux.sh": RL,
    "PaCo-GRPO/config/grpo.py": "",
    "PaCo-Reward/config/toy_reward_lora.yaml": "",
    "PaCo-Reward/evaluation/Consistency_Rank/eval.py": "",
}


@pytest.fixture
def repo(tmp_path):
    for path, text in COMMANDS.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/bash\n{text}\n")
        file.chmod(0o755)
    for path in ("quickstart/run.sh", "quickstart/common.sh", "tools/python.sh"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(REPO / path, tmp_path / path)
    return tmp_path


def start(repo: Path, *arguments: str, **more: str) -> subprocess.Popen:
    # Tests that were started in the background have some signals ignored, and bash keeps that.
    command = ["env", "--default-signal=HUP,INT,TERM", "bash", "quickstart/run.sh", *arguments]
    env = {**os.environ, "REAL": sys.executable, "STATE": str(repo), "FAIL": "", "HANG": "", **more}
    return subprocess.Popen(
        command, cwd=repo, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def drive(repo: Path, *arguments: str, **more: str) -> tuple[int, str, str]:
    """Exit status, output, errors."""
    process = start(repo, *arguments, **more)
    output, error = process.communicate(timeout=120)
    return process.returncode, output, error


def calls(repo: Path) -> list[str]:
    """What was called since the last time."""
    return (repo / "calls").rename(repo / "read").read_text().splitlines()


def running(repo: Path) -> list[psutil.Process]:
    """Processes that were started with our stand-in repository."""
    return [
        p
        for p in psutil.process_iter(["environ"])
        if (p.info["environ"] or {}).get("STATE") == str(repo)
    ]


def test_everything_once_then_nothing_then_fresh(repo):
    options = ("--seed", "3", "--minutes=2", "--config.num_epochs=2")
    status, output, error = drive(repo, *options)
    assert status == 0, output + error
    made = calls(repo)
    assert len(made) == len(ORDER) and all(
        word in call for word, call in zip(ORDER, made, strict=True)
    ), made
    assert (
        all("--seed 3" in made[i] for i in (0, 1, 3, 4))
        and "seed=3" in made[6]
        and "--config.seed=3" in made[14]
    )
    assert "--config.num_epochs=2" in made[14] and "--config.max_train_minutes=2" in made[14]
    assert set(re.findall(r"port=(\d+)", made[14])) == {made[13].removeprefix("launch.sh ")}
    assert not (repo / "serving").exists() and running(repo) == []
    assert "the table" in output and output.strip().endswith("quickstart/out/report.html")
    assert output.count("/6] ") == 6

    status, output, _ = drive(repo, *options)
    assert status == 0 and {call.split()[0] for call in calls(repo)} == {"stop.sh"}
    assert output.count("done before") == 6
    assert drive(repo, *options, "--fresh")[0] == 0
    assert len(calls(repo)) == len(ORDER)
    assert "starting over" in drive(repo, "--seed", "4")[1] and len(calls(repo)) == len(ORDER)
    (repo / "PaCo-GRPO/config/grpo.py").write_text("beta = 0.1")
    assert "starting over" in drive(repo, "--seed", "4")[1]


def test_a_failed_stage_stops_the_server_and_is_repeated_first(repo):
    status, _, error = drive(repo, FAIL="1")
    assert status == 3
    assert "judge went away" in error and "5-rl.log" in error and "Traceback" not in error
    assert not (repo / "serving").exists() and "stop.sh" in calls(repo)[-1]
    assert drive(repo)[0] == 0
    made = [
        call.split()[0] for call in calls(repo)
    ]  # the server is started again, the judge is not trained again
    assert made == [
        "stop.sh",
        "launch.sh",
        "train_flux.sh",
        "stop.sh",
        "python",
        "python",
        "stop.sh",
    ]


def test_a_wrong_seed_keeps_the_results(repo):
    assert drive(repo, "--seed=3")[0] == 0
    assert drive(repo, "--seed=three")[0] == 2
    assert drive(repo, "--seed=3")[1].count("done before") == 6


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_it_ends_everything_it_started(repo, number):
    process, deadline = start(repo, HANG="1"), time.monotonic() + 120
    while not (repo / "hanging").exists():  # its training does not end
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    assert (repo / "serving").exists()
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    if number == signal.SIGKILL:
        while running(repo):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    else:
        assert process.returncode == 130 and "interrupted" in error and "Traceback" not in error
        assert not (repo / "serving").exists() and running(repo) == []
