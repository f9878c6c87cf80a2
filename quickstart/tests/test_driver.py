"""The quickstart's driver on a stand-in repository: resume, seeds, Ctrl-C, failures; servers are always stopped."""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paco_toy import quickstart
from paco_toy.processes import QuickstartError
from paco_toy.server import free_port
from paco_toy.stages import EpochProgress, rank_measures
from paco_toy.summary import MEASURES, policy_measures, table
from paco_toy.world import (
    CHARACTERS,
    VIEWS,
    Character,
    assemble_grid,
    grid_prompt,
    opened,
    random_jitter,
    render_panel,
    to_uint8,
    write_jsonl,
)

# Small shell scripts in the places of the real commands: they note that they were called and write what those write.
NOTE = 'echo "$(basename "$0") $*" >> "$CALLS"\n'
LAUNCH = NOTE + 'echo "engine: transformers"; touch "$STATE/serving"'
STOP = NOTE + 'rm -f "$STATE/serving"'
PYTHON = NOTE + r"""
out="$STATE/quickstart/out"
case "$*" in
  *build_world*) mkdir -p $out/world/prompts
    for s in train test; do echo '{}' > $out/world/prompts/${s}_metadata.jsonl; done ;;
  *annotate*) mkdir -p $out/world/reward_data
    for s in cot_train full_test open_test none_test weak_test; do echo '[1]' > $out/world/reward_data/toy_pairs_$s.json; done ;;
  *eval_vllm*) mkdir -p $out/rank_results; echo '{"metrics": {"kendalltau": 0.8, "top1": 1.0}}' > $out/rank_results/judge-v3.jsonl ;;
  *eval.py*histogram*) echo '{"metrics": {"kendalltau": 0.5}}' > $out/rank_results/histogram.jsonl ;;
  *print_eval_table*) echo table > $out/rank_table.txt ;;
  *paco_grpo.report*) echo page > $out/report.html ;;
esac
"""
REWARD = NOTE + r"""
while [ $# -gt 0 ]; do [ "$1" = --output ] && output="$2"; shift; done
case "$output" in *.json) echo '{"accuracy": 0.9, "auc": 0.95, "n": 10, "kinds": {"toy_pairs_open_test": {"accuracy": 0.87}}}' > $output ;; esac
"""
RL = NOTE + r"""
run="$STATE/quickstart/out/runs/toy_t2is_awm"; mkdir -p $run
[ -n "$FAIL" ] && { echo "error: judge went away" >&2; exit 3; }
[ -n "$HANG" ] && { touch "$STATE/hanging"; sleep 300; }
cp -r "$STATE/eval" $run/; cp "$STATE/config.yaml" $run/
"""
DRIVER = "import sys; from pathlib import Path; from paco_toy import quickstart as q; q.REPO = Path(sys.argv.pop(1)); sys.exit(q.main())"


def evaluation(folder: Path, characters: list[list[int]], named: list[Character], score: float) -> None:
    """An evaluation of drawn images."""
    folder.mkdir(parents=True)
    rng, rows = np.random.default_rng(0), []
    for number, (panels, character) in enumerate(zip(characters, named, strict=True)):
        drawn = [render_panel(CHARACTERS[c], VIEWS[v], 32, random_jitter(rng)) for v, c in enumerate(panels)]
        Image.fromarray(to_uint8(assemble_grid(drawn))).save(folder / f"{number:05d}.png")
        row = {"file": f"{number:05d}.png", "prompt": grid_prompt(character, list(VIEWS[:4])), "rewards": {"consistency_score": score}}
        rows.append(row)
    write_jsonl(folder / "eval_data.jsonl", rows)


def two_evaluations(run: Path) -> None:
    """Of two full prompts and two open ones."""
    named = [CHARACTERS[0], CHARACTERS[0], opened(CHARACTERS[0], ("style", "colour")), opened(CHARACTERS[5], ("colour",))]
    evaluation(run / "eval/epoch_0000", [[0, 0, 1, 1], [0, 1, 2, 3], [0, 5, 10, 15], [5, 5, 0, 0]], named, 0.4)
    evaluation(run / "eval/epoch_0002", [[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 10, 10], [10, 10, 10, 10]], named, 0.6)


@pytest.fixture
def repo(tmp_path):
    """A folder with our scripts' names in their places."""

    def script(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/bash\n{text}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    script("bin/python", PYTHON)
    script("bin/paco-reward", REWARD)
    script("PaCo-Reward/train/paco_reward.sh", NOTE)
    script("PaCo-GRPO/vllm_server/launch.sh", LAUNCH)
    script("PaCo-GRPO/vllm_server/stop.sh", STOP)
    script("PaCo-GRPO/scripts/single_node/train_flux.sh", RL)
    (tmp_path / "PaCo-Reward/evaluation/Consistency_Rank").mkdir(parents=True)
    for name in ("judge", "flux"):
        (tmp_path / "quickstart/models" / name).mkdir(parents=True)
        (tmp_path / "quickstart/models" / name / "model.safetensors").write_bytes(b"w")
    for epoch, score in ((0, 0.4), (2, 0.6)):  # of full prompts alone
        evaluation(tmp_path / f"eval/epoch_{epoch:04d}", [[0] * 4, [0, 1, 2, 3]], [CHARACTERS[0]] * 2, score)
    (tmp_path / "config.yaml").write_text("train: {resolution: 64}\ntest: {resolution: 128}\n")
    return tmp_path


def environment(repo: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHON": str(repo / "bin/python"), "CALLS": str(repo / "calls"), "STATE": str(repo), "FAIL": "", "HANG": "", **more}


def drive(repo: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", DRIVER, repo, *arguments], env=environment(repo, **more), check=False,
                          capture_output=True, text=True, timeout=120)  # fmt: skip


def calls(repo: Path) -> list[str]:
    text = (repo / "calls").read_text() if (repo / "calls").exists() else ""
    (repo / "calls").unlink(missing_ok=True)
    return text.splitlines()


def test_everything_once_then_nothing_then_fresh(repo):
    done = drive(repo, "--seed", "3", "--minutes", "2", "--config.num_epochs=2")
    assert done.returncode == 0, done.stderr
    made = calls(repo)
    order = ["build_world", "reward_data draw", "--sets_only", "reward_data annotate", "--rankings", "reward_data finish",
             "accuracy", "paco_reward.sh", "accuracy", "export", "eval_vllm", "histogram", "print_eval_table", "stop.sh", "launch.sh", "train_flux.sh",
             "stop.sh", "paco_grpo.report"]  # fmt: skip
    assert len(made) == len(order) and all(word in call for word, call in zip(order, made, strict=True)), made
    assert all("--seed 3" in made[i] for i in (0, 1, 2, 4, 5)) and "seed=3" in made[7] and "--config.seed=3" in made[15]
    assert "--config.num_epochs=2" in made[15] and "--config.max_train_minutes=2.0" in made[15]
    assert not (repo / "serving").exists()
    summary = json.loads((repo / "quickstart/out/summary.json").read_text())
    assert summary["judge"]["base"]["accuracy"] == 0.9 and summary["judge"]["lora"]["auc"] == 0.95
    assert summary["judge"]["lora"]["kinds"]["toy_pairs_open_test"]["accuracy"] == 0.87 and "open 0.870" in done.stdout
    assert summary["rank"] == {"kendalltau": 0.8, "top1": 1.0, "items": 1, "histogram": {"kendalltau": 0.5, "items": 1}}
    assert summary["policy"]["after"]["reward"] == pytest.approx(0.6)
    assert set(summary["policy"]["change"]) == set(MEASURES) - {"agreement", "choice", "kappa"}
    assert (summary["train_resolution"], summary["test_resolution"], summary["engine"]) == (64, 128, "transformers")
    assert set(summary["stage_seconds"]) == {"world", "judge", "rank", "server", "rl", "report"}
    assert summary["seed"] == 3 and summary["peak_rss_mb"] > 5 and "torch" in summary["versions"]
    assert done.stdout.strip().splitlines()[-1].endswith("quickstart/out/report.html")
    assert "consistency, full prompts" in done.stdout

    again = drive(repo, "--seed", "3", "--minutes", "2", "--config.num_epochs=2")
    assert again.returncode == 0 and calls(repo) == [] and again.stdout.count("finished before") == 6
    assert drive(repo, "--seed", "3", "--minutes", "2", "--config.num_epochs=2", "--fresh").returncode == 0
    assert len(calls(repo)) == len(order)
    other = drive(repo, "--seed", "4")
    assert "starting over" in other.stdout and len(calls(repo)) == len(order)


def test_a_failed_stage_stops_the_server_and_is_repeated_first(repo):
    done = drive(repo, FAIL="1")
    assert done.returncode == 1
    assert "judge went away" in done.stderr and "5-rl.log" in done.stderr and "Traceback" not in done.stderr
    assert not (repo / "serving").exists() and "stop.sh" in calls(repo)[-1]
    assert drive(repo).returncode == 0
    made = calls(repo)  # the server is started again, the judge is not trained again
    assert [m.split()[0] for m in made] == ["stop.sh", "launch.sh", "train_flux.sh", "stop.sh", "python"]
    assert "--config.resume_from=latest" in made[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_it_ends_everything_it_started(repo, number):
    process = subprocess.Popen([sys.executable, "-c", DRIVER, repo], env=environment(repo, HANG="1"), text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    try:
        for _ in range(2400):
            if (repo / "hanging").exists():
                break
            time.sleep(0.05)
        assert (repo / "serving").exists()
        process.send_signal(number)
        _, error = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 130 and "interrupted" in error and "Traceback" not in error
    assert not (repo / "serving").exists()
    state = json.loads((repo / "quickstart/out/state.json").read_text())
    assert set(state["results"]) == {"world", "judge", "rank", "server"}
    assert running(repo) == []


def running(repo: Path) -> list[int]:
    """Processes that were started with our stand-in repository."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(repo / "calls").encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_killed_and_started_again_it_first_ends_what_it_left(repo):
    """A child of the trainer and a server that has left the driver's session are found, and nothing else is."""
    hanging = RL.replace("touch", "setsid sleep 301 & touch")
    (repo / "PaCo-GRPO/scripts/single_node/train_flux.sh").write_text(f"#!/bin/bash\n{hanging}\n")
    process = subprocess.Popen([sys.executable, "-c", DRIVER, repo], env=environment(repo, HANG="1"),
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    deadline = time.monotonic() + 120
    while not (repo / "hanging").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    left = []
    while not left or left != running(repo):  # a shell that has just started its child ends by itself
        left = running(repo)
        time.sleep(0.5)
    other = subprocess.Popen(["sleep", "300"], env=environment(repo))
    try:
        again = drive(repo)
        assert again.returncode == 0, again.stderr
        assert f"ended {len(left)} processes of an earlier quickstart" in again.stderr
        assert running(repo) == [other.pid]
    finally:
        other.kill()
        other.wait()


def test_a_command_ends_with_a_killed_driver(repo):
    process = subprocess.Popen([sys.executable, "-c", DRIVER, repo], env=environment(repo, HANG="1"),
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    script = repo / "PaCo-GRPO/scripts/single_node/train_flux.sh"
    script.write_text(script.read_text().replace("sleep 300", "exec sleep 300"))
    deadline = time.monotonic() + 120
    while not (repo / "hanging").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    while running(repo):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_missing_models_say_how_to_get_them(repo):
    shutil.rmtree(repo / "quickstart/models/flux")
    done = drive(repo)
    assert done.returncode == 1 and calls(repo) == []
    assert "models/flux" in done.stderr and "--rebuild" in done.stderr


def test_rebuild_runs_the_builder_first(repo):
    (repo / "tools").mkdir()
    assert drive(repo, "--rebuild").returncode == 0
    made = calls(repo)
    assert f"toy_models.build --out {repo}/quickstart/models" in made[0] and "build_world" in made[1]


def test_results_depend_on_arguments_configurations_and_base_models(repo):
    models = repo / "quickstart/models"
    settings = [(0, 5.0, ()), (1, 5.0, ()), (0, 6.0, ()), (0, 5.0, ("--config.a=1",))]
    keys = [quickstart.settings_key(*each, repo) for each in settings]
    (models / "flux_kontext").mkdir()
    (models / "flux_kontext/model.safetensors").write_bytes(b"an editor's, not used here")
    assert quickstart.settings_key(0, 5.0, (), repo) == keys[0]
    (models / "flux/model.safetensors").write_bytes(b"other")
    keys.append(quickstart.settings_key(0, 5.0, (), repo))
    (repo / "PaCo-GRPO/config").mkdir()
    (repo / "PaCo-GRPO/config/grpo.py").write_text("beta = 0.1")
    keys.append(quickstart.settings_key(0, 5.0, (), repo))
    assert len(set(keys)) == 6


def test_no_space_is_refused_before_work(repo, monkeypatch, capsys):
    monkeypatch.setattr(quickstart, "REPO", repo)
    monkeypatch.setattr(quickstart.shutil, "disk_usage", lambda _: type("U", (), {"free": 10 << 20})())
    monkeypatch.setattr("paco_toy.drivers.signal.signal", lambda *_: None)
    assert quickstart.main([]) == 1
    assert "10 MB free" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--sead", "1"], ["--seed", "x"], ["--seed", "-1"]])
def test_unknown_arguments_are_refused(arguments):
    with pytest.raises(SystemExit) as stopped:
        quickstart.main(arguments)
    assert stopped.value.code == 2


def test_a_taken_port_is_replaced():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) != port
    assert free_port(port) == port


def test_epoch_progress_by_epochs_or_by_time(tmp_path):
    line = "12:00:01 epoch 6/60: between_images 0.9, consistency_score 0.4512, loss 1e-3"
    assert EpochProgress(tmp_path, None)(line) == (0.1, "epoch 6, judge's score 0.451")
    (tmp_path / "metrics.jsonl").write_text('{"phase": "train", "epoch": 6, "train_time": 180.0}\n')
    assert EpochProgress(tmp_path, 6.0)(line)[0] == 0.5
    assert EpochProgress(tmp_path, None)("saved x") is None


def test_measures_are_of_the_prompts_that_they_apply_to(tmp_path):
    two_evaluations(tmp_path)
    found = policy_measures(tmp_path)
    assert found["before"]["consistency"] == pytest.approx(1 / 6) and found["after"]["consistency"] == pytest.approx(3 / 4)
    agreement = {when: found[when]["agreement"] for when in ("before", "after")}
    assert agreement == pytest.approx({"before": (0 + 2 / 6) / 2, "after": (2 / 6 + 1) / 2})
    change = found["change"]["agreement"]
    differences = np.array([2 / 6, 4 / 6])
    assert change == pytest.approx({"mean": differences.mean(), "stderr": differences.std(ddof=1) / 2**0.5})
    assert found["change"]["choice"]["stderr"] > 0 and found["change"]["reward"]["mean"] == pytest.approx(0.2)
    assert (found["epochs"], found["num_images"]) == (2, 4)

    full = tmp_path / "full"
    for epoch in (0, 1):
        evaluation(full / f"eval/epoch_{epoch:04d}", [[0] * 4] * 2, [CHARACTERS[0]] * 2, 0.5)
    assert set(policy_measures(full)["change"]) == set(MEASURES) - {"agreement", "choice", "kappa"}


def test_measures_need_two_evaluations(tmp_path):
    evaluation(tmp_path / "eval/epoch_0000", [[0] * 4], [CHARACTERS[0]], 0.5)
    with pytest.raises(QuickstartError, match="has 1 evaluations"):
        policy_measures(tmp_path)
    unsaved = tmp_path / "eval/epoch_0001"
    unsaved.mkdir()
    write_jsonl(unsaved / "eval_data.jsonl", [{"file": None, "prompt": "", "rewards": {}}])
    with pytest.raises(QuickstartError, match="test.save_eval_images"):
        policy_measures(tmp_path)


def test_rank_means_leave_failed_items_out(tmp_path):
    rows = [{"metrics": {"accuracy": 1.0, "kendalltau": 0.5}}, {"metrics": {"accuracy": 0.0, "kendalltau": None}}, {"error": "x"}]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert rank_measures(tmp_path / "r.jsonl") == {"accuracy": 0.5, "kendalltau": 0.5, "items": 2}


def test_table():
    measures, change = dict.fromkeys(MEASURES, 0.5), {name: {"mean": 0.2, "stderr": 0.04} for name in MEASURES}
    judge = {which: {"accuracy": a, "auc": a, "kinds": {"toy_pairs_open_test": {"accuracy": a - 0.01}}} for which, a in (("base", 0.5), ("lora", 0.97))}
    rank = {"kendalltau": 0.65, "histogram": {"kendalltau": 0.52}}
    summary = {"judge": judge, "rank": rank, "train_resolution": 64, "test_resolution": 128,
               "policy": {"before": measures, "after": dict.fromkeys(MEASURES, 0.7), "change": change}}  # fmt: skip
    text = table(summary)
    assert all(number in text for number in ("+0.200 ±0.040", "0.970", "0.960", "0.650")) and "128 px, trained at 64 px" in text
    assert max(map(len, text.splitlines())) <= 80
