"""scripts/plan_gpus.py against cases computed by hand, its own rules on random cases, and files of a run."""

import dataclasses
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import load_script

plan = load_script("plan_gpus")
# 96 images of 6 pairs; a GPU samples one in 2 s and trains on one in 1 s; a judge answers 12 pairs a second.
WORK = plan.Workload(96, 4, 6, 2.0, 1.0, 5.0, 12.0)


@pytest.mark.parametrize(
    ("generating", "serving", "sample", "reward", "wait", "train", "bottleneck"),
    [
        # 4 GPUs: 6 batches of 8 s; 576 pairs / 48 = 12 s of judging, 2 s of it for the last batch, which is waited for
        (4, 4, 48.0, 12.0, 2.0, 24.0, "sampling"),
        # 6 GPUs: 4 batches of 8 s; 24 s, 6 s for the last batch; the judge keeps up: 8 + 24 = 32 = sample
        (6, 2, 32.0, 24.0, 6.0, 16.0, "sampling"),
        # 8 GPUs, 1 judge: 3 batches; 48 s begin after 8 s: done at 56, sampled at 24
        (8, 1, 24.0, 48.0, 32.0, 12.0, "rewards"),
        # more GPUs than images need at this batch size: the last batch is no smaller than the share
        (96, 96, 2.0, 0.5, 0.5, 1.0, "sampling"),
    ],
)
def test_by_hand(generating, serving, sample, reward, wait, train, bottleneck):
    split = plan.predict(WORK, generating, serving)
    assert (split.sample, split.reward, split.wait, split.train) == pytest.approx((sample, reward, wait, train))
    assert split.epoch == pytest.approx(sample + wait + train + 5.0)
    assert split.bottleneck == bottleneck


def test_pairs_of_layouts():
    assert [plan.pairs_of_layout(name) for name in ("1x1", "1x2", "2x2", "2x3", "2X4")] == [0, 1, 6, 15, 28]
    with pytest.raises(plan.PlanError, match="rows x columns"):
        plan.pairs_of_layout("four")


seconds = st.floats(0.01, 50)
workloads = st.builds(
    plan.Workload, images=st.integers(1, 2000), batch_size=st.integers(1, 32), pairs=st.integers(1, 28),
    sample_seconds=seconds, train_seconds=seconds, other_seconds=st.floats(0, 100), pairs_per_second=st.floats(0.1, 1000),
)  # fmt: skip


@given(workloads, st.integers(2, 40))
def test_rules(work, gpus):
    found = plan.splits(work, gpus)
    assert [(s.generating, s.serving) for s in found] == [(gpus - j, j) for j in range(1, gpus)]
    assert min(s.epoch for s in found) == plan.best(found).epoch
    for fewer, more in itertools.pairwise(found):
        assert more.reward <= fewer.reward and more.sample >= fewer.sample and more.train >= fewer.train
    for split in found:
        more = plan.predict(work, split.generating, split.serving + 1)
        assert more.epoch <= split.epoch * (1 + 1e-12) and more.wait <= split.wait * (1 + 1e-9) + 1e-9
        assert split.epoch >= max(split.sample, split.reward) + split.train - 1e-6
        faster = plan.predict(dataclasses.replace(work, pairs_per_second=2 * work.pairs_per_second), split.generating, split.serving)  # fmt: skip
        assert faster.epoch <= split.epoch * (1 + 1e-12)


def test_a_judge_of_several_gpus_and_no_judge_at_all():
    assert [s.serving for s in plan.splits(WORK, 8, 2)] == [2, 4, 6]
    (alone,) = plan.splits(dataclasses.replace(WORK, pairs=0), 8)
    assert (alone.generating, alone.serving, alone.wait) == (8, 0, 0.0)
    with pytest.raises(plan.PlanError, match="too few"):
        plan.splits(WORK, 2, 2)
    with pytest.raises(plan.PlanError, match="pairs_per_second"):
        plan.splits(dataclasses.replace(WORK, pairs_per_second=0.0), 8)


@pytest.fixture
def run_folder(tmp_path):
    """Two processes, 96 images; the first epoch is slower than the others."""
    rows = []
    for s in (150.0, 96.0, 94.0, 98.0):
        seconds = {"sample_s": s, "reward_wait_s": 20.0, "train_s": 48.0, "epoch_s": s + 73.0}
        rows.append({"phase": "train"} | {f"time/{name}": value for name, value in seconds.items()})
    rows.append({"phase": "eval", "time/eval_s": 5.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "plan.json").write_text(json.dumps({"samples": 96, "num_processes": 2, "sample_batch_size": 4}))
    return tmp_path


def test_measured_files_are_read(run_folder, tmp_path, capsys):
    measured = plan.read_run(run_folder)
    assert (measured.sample_seconds, measured.train_seconds, measured.other_seconds) == (2.0, 1.0, 5.0)
    assert (measured.images, measured.batch_size, measured.processes) == (96, 4, 2)
    report = tmp_path / "judge_load.json"
    rows = [("a", 1, 3.0), ("a", 16, 24.0), ("a", 64, 20.0), ("b", 16, 90.0)]
    targets = [{"target": t, "concurrency": c, "pairs_per_second": p} for t, c, p in rows]
    report.write_text(json.dumps({"targets": targets}))
    command = ["--gpus", "8", "--run", str(run_folder), "--judge-load", str(report), "--judge-gpus", "2"]
    assert plan.main(command) == 2 and "choose one with --judge-target" in capsys.readouterr().err
    assert plan.main([*command, "--judge-target", "a", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["workload"] == dataclasses.asdict(WORK)
    assert report["best"] == dataclasses.asdict(plan.best(plan.splits(WORK, 8)))
    assert plan.main([*command, "--judge-target", "a"]) == 0
    assert capsys.readouterr().out.count("<- best") == 1


def test_seconds_are_read_from_a_benchmark(tmp_path, capsys):
    seconds = {"sampling": 96.0, "reward_wait": 3.0, "training": 48.0, "epoch": 152.0}
    made = {"plan": {"samples": 96, "num_processes": 2, "sample_batch_size": 4},
            "seconds": {name: {"median": value, "low": value, "high": value} for name, value in seconds.items()}}  # fmt: skip
    file = tmp_path / "epoch.json"
    file.write_text(json.dumps({"results": [made | {"label": "as configured"}, made | {"label": "speed.compile=on"}]}))
    with pytest.raises(plan.PlanError, match=r"as configured, speed.compile=on: choose one with --setting"):
        plan.read_epoch(file)
    measured = plan.read_epoch(file, "speed.compile=on")
    assert (measured.sample_seconds, measured.train_seconds, measured.other_seconds) == (2.0, 1.0, 5.0)
    command = ["--gpus", "8", "--epoch", str(file), "--setting", "as configured", "--judge-pairs-per-second", "12", "--json"]
    assert plan.main(command) == 0
    assert json.loads(capsys.readouterr().out)["workload"] == dataclasses.asdict(WORK)
    assert plan.main([*command, "--run", str(tmp_path)]) == 2 and "give one" in capsys.readouterr().err
    file.write_text("[]")
    assert plan.main(command) == 2 and "no report of epoch.py" in capsys.readouterr().err


def test_check_compares_with_the_measured_epoch(run_folder, capsys):
    command = ["--run", str(run_folder), "--check", "--judge-pairs-per-second", "12"]
    assert plan.main(command) == 0
    said = capsys.readouterr().out
    # 12 batches of 8 s; 48 s of judging begin after 8 s and end before the sampling does: the last batch's 4 s remain
    assert "4.00s    20.00s" in said and "153.00s   169.00s" in said and "0.905" in said


def test_a_real_run_takes_the_predicted_time(tiny_flux_dir, tmp_path):
    """A reward of two images a second; sampling and training seconds are the run's own."""
    from tiny_run import tiny_options, train

    reward = {"train__reward_fn": '{"tiny_run:slow": 1.0}', "train__reward_fn_kwargs": '{"tiny_run:slow": {"seconds_per_image": 0.5}}'}  # fmt: skip
    train(tiny_options(tiny_flux_dir, tmp_path, num_epochs=2, **reward))
    measured = plan.read_run(tmp_path / "runs" / "run")
    work = plan.Workload(
        measured.images, measured.batch_size, 1, measured.sample_seconds, measured.train_seconds,
        measured.other_seconds, pairs_per_second=2.0,
    )  # fmt: skip
    split = plan.predict(work, 1, 1)
    assert split.reward == pytest.approx(4.0)
    assert split.epoch == pytest.approx(measured.epoch, rel=0.25)
    assert split.wait == pytest.approx(measured.reward_wait, rel=0.25, abs=0.3)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["--gpus", "8"], "how fast is the judge"),
        (["--gpus", "8", "--judge-pairs-per-second", "9"], "--sample-seconds is missing"),
        (["--judge-pairs-per-second", "9", "--sample-seconds", "1", "--train-seconds", "1"], "--gpus is missing"),
        (["--gpus", "1", "--judge-pairs-per-second", "9", "--sample-seconds", "1", "--train-seconds", "1"], "too few"),
        (["--gpus", "8", "--run", "nowhere", "--pairs", "0"], "--run nowhere"),
        (["--check", "--pairs", "0", "--sample-seconds", "1", "--train-seconds", "1"], "give --run"),
    ],
)
def test_what_is_missing_is_said_in_one_line(command, said, capsys):
    assert plan.main(command) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
