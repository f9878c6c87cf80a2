"""run.sh on a stand-in repository: stages are skipped when they are done, and everything it started is ended."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).resolve().parents[1]
# Small shell scripts in the places of the real commands: they note that they were called and write what those write.
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
RL = NOTE + r"""
[ -n "$FAIL" ] && { echo "error: judge went away" >&2; exit 3; }
[ -n "$HANG" ] && { touch "$STATE/hanging"; sleep 300; }
exit 0
"""
ORDER = ["build_world", "reward_data draw", "--sets_only", "reward_data annotate", "--rankings", "reward_data finish", "accuracy",
         "paco_reward.sh", "accuracy", "export", "eval_vllm", "histogram", "print_eval_table", "stop.sh", "launch.sh", "train_flux.sh",
         "stop.sh", "paco_toy.summary", "paco_grpo.report", "stop.sh"]  # fmt: skip


@pytest.fixture
def repo(tmp_path):
    """A folder with our scripts' names in their places."""

    def script(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/bash\n{text}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    (tmp_path / "quickstart/paco_toy").mkdir(parents=True)
    (tmp_path / "tools").mkdir()
    for name in ("run.sh", "common.sh"):
        shutil.copy(QUICKSTART / name, tmp_path / "quickstart")
    shutil.copy(QUICKSTART.parent / "tools" / "python.sh", tmp_path / "tools")
    script("setup.sh", "")
    script(".venv/bin/python", PYTHON)
    script(".venv/bin/paco-reward", NOTE)
    script("PaCo-Reward/train/paco_reward.sh", NOTE)
    script("PaCo-GRPO/vllm_server/launch.sh", NOTE + 'touch "$STATE/serving"')
    script("PaCo-GRPO/vllm_server/stop.sh", NOTE + 'rm -f "$STATE/serving"')
    script("PaCo-GRPO/scripts/single_node/train_flux.sh", RL)
    script("PaCo-GRPO/config/grpo.py", "")
    script("PaCo-Reward/config/toy_reward_lora.yaml", "")
    (tmp_path / "PaCo-Reward/evaluation/Consistency_Rank").mkdir(parents=True)
    return tmp_path


def environment(repo: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "REAL": sys.executable, "STATE": str(repo), "FAIL": "", "HANG": "", **more}


def drive(repo: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", "quickstart/run.sh", *arguments], cwd=repo, env=environment(repo, **more), check=False,
                          capture_output=True, text=True, timeout=120)  # fmt: skip


def calls(repo: Path) -> list[str]:
    text = (repo / "calls").read_text() if (repo / "calls").exists() else ""
    (repo / "calls").unlink(missing_ok=True)
    return text.splitlines()


def running(repo: Path) -> list[int]:
    """Processes that were started with our stand-in repository."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"STATE={repo}\0".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def hanging(repo: Path) -> subprocess.Popen:
    """A run whose training does not end."""
    # Whoever started the tests in the background had some signals ignored, and bash keeps that.
    command = ["env", "--default-signal=HUP,INT,TERM", "bash", "quickstart/run.sh"]
    process = subprocess.Popen(command, cwd=repo, env=environment(repo, HANG="1"), text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    deadline = time.monotonic() + 120
    while not (repo / "hanging").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return process


def test_everything_once_then_nothing_then_fresh(repo):
    done = drive(repo, "--seed", "3", "--minutes=2", "--config.num_epochs=2")
    assert done.returncode == 0, done.stdout + done.stderr
    made = calls(repo)
    assert len(made) == len(ORDER) and all(word in call for word, call in zip(ORDER, made, strict=True)), made
    assert all("--seed 3" in made[i] for i in (0, 1, 2, 4, 5)) and "seed=3" in made[7] and "--config.seed=3" in made[15]
    assert "--config.num_epochs=2" in made[15] and "--config.max_train_minutes=2" in made[15]
    assert not (repo / "serving").exists() and running(repo) == []
    assert "the table" in done.stdout and done.stdout.strip().endswith("quickstart/out/report.html")
    assert done.stdout.count("/6] ") == 6

    again = drive(repo, "--seed", "3", "--minutes=2", "--config.num_epochs=2")
    assert again.returncode == 0 and {call.split()[0] for call in calls(repo)} == {"stop.sh"}
    assert again.stdout.count("done before") == 6
    assert drive(repo, "--seed", "3", "--minutes=2", "--config.num_epochs=2", "--fresh").returncode == 0
    assert len(calls(repo)) == len(ORDER)
    assert "starting over" in drive(repo, "--seed", "4").stdout and len(calls(repo)) == len(ORDER)
    (repo / "PaCo-GRPO/config/grpo.py").write_text("beta = 0.1")
    assert "starting over" in drive(repo, "--seed", "4").stdout


def test_a_failed_stage_stops_the_server_and_is_repeated_first(repo):
    done = drive(repo, FAIL="1")
    assert done.returncode == 3
    assert "judge went away" in done.stderr and "5-rl.log" in done.stderr and "Traceback" not in done.stderr
    assert not (repo / "serving").exists() and "stop.sh" in calls(repo)[-1]
    assert drive(repo).returncode == 0
    made = [call.split()[0] for call in calls(repo)]  # the server is started again, the judge is not trained again
    assert made == ["stop.sh", "launch.sh", "train_flux.sh", "stop.sh", "python", "python", "stop.sh"]


def test_interrupted_it_ends_everything_it_started(repo):
    process = hanging(repo)
    assert (repo / "serving").exists()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in error and "Traceback" not in error
    assert not (repo / "serving").exists() and running(repo) == []


def test_a_taken_port_is_replaced(repo):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = drive(repo, PACO_QUICKSTART_PORT=port)
    assert done.returncode == 0 and f"port {port} is taken" in done.stdout
    trained = next(call for call in calls(repo) if "train_flux" in call)
    assert "consistency_score.base_url=http://127.0.0.1:" in trained and f":{port}" not in trained
