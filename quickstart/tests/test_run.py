"""run.sh on a stand-in repository.

Stages are skipped when they are done, and everything it started is ended.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

REPO = Path(__file__).resolve().parents[2]
# In the places of the real commands, these note that they were called and write what those write.
NOTE = 'echo "$(basename "$0") $*" >> "$STATE/calls"\n'
PYTHON = r"""
if [ "$1" = scripts/train.py ]; then
  case "$*" in *trian*) echo "error: no such option" >&2; exit 2 ;; esac
  exit 0
fi
echo "python $*" >> "$STATE/calls"
out="$STATE/quickstart/out"
case "$*" in
  *print_eval_table*) echo table > $out/rank_table.txt ;;
  *paco_toy.summary*) echo "the table" > $out/summary.txt ;;
esac
"""
FAIL_OR_HANG = r"""
[ -n "$FAIL" ] && { echo "error: judge went away" >&2; exit 3; }
[ -n "$HANG" ] && { touch "$STATE/hanging"; exec sleep 300; }
exit 0
"""
RL = NOTE + FAIL_OR_HANG
LAUNCH = 'echo "launch.sh $VLLM_PORT" >> "$STATE/calls"; touch "$STATE/serving"'
ORDER = [
    *("stop.sh", "build_world", "--sets_only", "annotate", "--rankings", "finish"),
    *("accuracy", "paco_reward.sh", "accuracy", "export"),
    *("eval_vllm", "histogram", "print_eval_table"),
    *("launch.sh", "train_flux.sh", "stop.sh", "paco_toy.summary", "paco_toy.report", "stop.sh"),
]
COMMANDS = {
    "setup.sh": "",
    ".venv/bin/python": PYTHON,
    ".venv/bin/paco-reward": NOTE,
    "PaCo-Reward/train/paco_reward.sh": NOTE,
    "PaCo-GRPO/vllm_server/launch.sh": LAUNCH,
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
    env = {**os.environ, "STATE": str(repo), "FAIL": "", "HANG": "", **more}
    return subprocess.Popen(
        command,
        cwd=repo,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
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
    commands = calls(repo)
    assert len(commands) == len(ORDER)
    assert all(word in command for word, command in zip(ORDER, commands, strict=True))
    assert all("--seed 3" in commands[i] for i in (1, 2, 4, 5))
    assert "seed=3" in commands[7]
    launch, training = commands[13:15]
    for option in ("seed=3", "num_epochs=2", "max_train_minutes=2"):
        assert f"--config.{option} " in f"{training} "
    assert set(re.findall(r"port=(\d+)", training)) == {launch.removeprefix("launch.sh ")}
    assert not (repo / "serving").exists()
    assert running(repo) == []
    assert "the table" in output

    assert drive(repo, *options)[0] == 0
    assert {call.split()[0] for call in calls(repo)} == {"stop.sh"}
    assert drive(repo, *options, "--fresh")[0] == 0
    assert len(calls(repo)) == len(ORDER)


def test_a_failed_stage_stops_the_server_and_is_repeated_first(repo):
    status, _, error = drive(repo, FAIL="1")
    assert status == 3
    assert "judge went away" in error
    assert not (repo / "serving").exists()
    assert "stop.sh" in calls(repo)[-1]
    # The server is started again, the judge is not trained again.
    assert drive(repo)[0] == 0
    programs = [call.split()[0] for call in calls(repo)]
    assert programs[:4] == ["stop.sh", "launch.sh", "train_flux.sh", "stop.sh"]
    assert programs[4:] == ["python", "python", "stop.sh"]


@pytest.mark.parametrize("argument", ["--seed=three", "--config.trian.learning_rate=1"])
def test_what_cannot_be_used_is_refused_before_anything_begins(repo, argument):
    assert drive(repo, "--seed=3")[0] == 0
    calls(repo)
    assert drive(repo, argument)[0] == 2
    assert not (repo / "calls").exists()
    assert drive(repo, "--seed=3")[0] == 0
    assert {call.split()[0] for call in calls(repo)} == {"stop.sh"}


@pytest.mark.parametrize(
    ("argument", "file"),
    [
        ("--seed=4", ""),
        ("--seed=3", "PaCo-Reward/config/toy_reward_lora.yaml"),
        ("--config.num_epochs=2", ""),
        ("--seed=3", "PaCo-GRPO/config/grpo.py"),
    ],
)
def test_other_settings_are_refused_unless_it_starts_over(repo, argument, file):
    out = repo / "quickstart" / "out"
    assert drive(repo, "--seed=3")[0] == 0
    calls(repo)
    for folder in ("judge", "editing", "study", "earlier"):
        (out / folder).mkdir()
        (out / folder / "weights").write_text("hours of work")
    if file:
        (repo / file).write_text("beta: 0.1")
    arguments = ("--seed=3", argument)
    status, _, error = drive(repo, *arguments)
    assert status == 2
    assert "--fresh" in error and str(out) in error
    assert [call.split()[0] for call in calls(repo)] == ["stop.sh", "stop.sh"]
    assert (out / "judge" / "weights").exists()
    assert drive(repo, *arguments, "--fresh")[0] == 0
    assert len(calls(repo)) == len(ORDER)
    kept = {path.parent.name for path in out.rglob("weights")}
    assert kept == {"editing", "study", "earlier"}  # deletes only what this command wrote


def test_with_more_minutes_the_training_goes_on(repo):
    assert drive(repo, "--seed=3")[0] == 0
    calls(repo)
    assert drive(repo, "--seed=3", "--minutes=20")[0] == 0
    called = [call for call in calls(repo) if not call.startswith("stop.sh")]
    again = ["launch.sh", "train_flux.sh", "paco_toy.summary", "paco_toy.report"]
    assert all(word in call for word, call in zip(again, called, strict=True))


STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def start_and_hang(repo: Path) -> subprocess.Popen:
    """A run in a session of its own, in a training that does not end."""
    process = start(repo, HANG="1")
    deadline = time.monotonic() + 120
    while not (repo / "hanging").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


@pytest.mark.parametrize("number", STATUS)
def test_interrupted_it_ends_everything_it_started(repo, number):
    process = start_and_hang(repo)
    assert (repo / "serving").exists()
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == STATUS[number]
    assert not (repo / "serving").exists()
    assert running(repo) == []


def test_after_a_kill_the_next_run_names_what_is_left(repo):
    process = start_and_hang(repo)
    process.kill()
    process.communicate(timeout=60)
    (left,) = [p for p in running(repo) if p.name() == "sleep"]
    status, _, error = drive(repo)
    assert status == 1
    assert str(left.pid) in error
    left.kill()
    calls(repo)
    assert drive(repo)[0] == 0
    assert calls(repo)[0].startswith("stop.sh")  # before anything is served again
