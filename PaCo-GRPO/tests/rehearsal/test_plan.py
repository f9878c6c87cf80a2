"""The judge's share of GPUs against cases computed by hand, its own rules on random cases, and files of a run."""

import dataclasses
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import ROOT, load_script

from paco_grpo.rehearsal import plan

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


@pytest.fixture(scope="module")
def rehearse():
    return load_script("rehearse")


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


def options_of(folder):
    """The arguments of a run that is named, not rehearsed."""
    return ["--config", f"{ROOT}/config/grpo.py:t2is", "--pairs", "6", "--run", str(folder)]


def test_measured_files_are_read(run_folder, rehearse, tmp_path, capsys):
    found = rehearse.read_run(run_folder)
    work = plan.Workload(**found["work"], pairs=6, pairs_per_second=12.0)
    assert (work, found["processes"]) == (WORK, 2)
    report = tmp_path / "judge_load.json"
    rows = [("a", 1, 3.0), ("a", 16, 24.0), ("a", 64, 20.0), ("b", 16, 90.0)]
    targets = [{"target": t, "concurrency": c, "pairs_per_second": p} for t, c, p in rows]
    report.write_text(json.dumps({"targets": targets}))
    command = [*options_of(run_folder), "--gpus", "8", "--judge_load", str(report), "--judge_gpus", "2"]
    assert rehearse.main(command) == 2 and "choose one with --judge_target" in capsys.readouterr().err
    assert rehearse.main([*command, "--judge_target", "a"]) == 0
    said = capsys.readouterr().out
    assert "12 a second and GPU (measured)" in said and said.count("<- best") == 1
    best = plan.best(plan.splits(WORK, 8))
    assert f"{best.generating:>8} {best.serving:>5}" in next(x for x in said.splitlines() if "<- best" in x)


def test_seconds_are_read_from_a_benchmark(rehearse, tmp_path):
    seconds = {"sampling": 96.0, "reward_wait": 3.0, "training": 48.0, "epoch": 152.0}
    made = {"plan": {"samples": 96, "num_processes": 2, "sample_batch_size": 4},
            "seconds": {name: {"median": value, "low": value, "high": value} for name, value in seconds.items()}}  # fmt: skip
    file = tmp_path / "epoch.json"
    file.write_text(json.dumps({"results": [made]}))
    assert plan.Workload(**rehearse.read_run(file)["work"], pairs=6, pairs_per_second=12.0) == WORK
    file.write_text("[]")
    with pytest.raises(plan.PlanError, match=r"or a report of benchmarks/epoch\.py"):
        rehearse.read_run(file)


def test_a_run_is_compared_with_what_its_own_seconds_predict(run_folder, rehearse, capsys):
    assert rehearse.main([*options_of(run_folder), "--judge_pairs_per_second", "12"]) == 0
    said = capsys.readouterr().out
    # 12 batches of 8 s; 48 s of judging begin after 8 s and end before the sampling does: the last batch's 4 s remain
    assert "4.00s    20.00s" in said and "153.00s   169.00s" in said and "0.905" in said


def test_a_real_run_takes_the_predicted_time(tiny_flux_dir, tmp_path, rehearse):
    """A reward of two images a second; sampling and training seconds are the run's own."""
    from tiny_run import tiny_options, train

    reward = {"train__reward_fn": '{"tiny_run:slow": 1.0}', "train__reward_fn_kwargs": '{"tiny_run:slow": {"seconds_per_image": 0.5}}'}  # fmt: skip
    train(tiny_options(tiny_flux_dir, tmp_path, num_epochs=2, **reward))
    measured = rehearse.read_run(tmp_path / "runs" / "run")
    split = plan.predict(plan.Workload(**measured["work"], pairs=1, pairs_per_second=2.0), 1, 1)
    assert split.reward == pytest.approx(4.0)
    assert split.epoch == pytest.approx(measured["times"]["epoch"], rel=0.25)
    assert split.wait == pytest.approx(measured["times"]["reward_wait"], rel=0.25, abs=0.3)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["--gpu", "none"], "--gpu 'none' is not known"),
        (["--run", "nowhere"], "--run nowhere"),
        (["--judge_load", "nowhere"], "--judge_load nowhere"),
    ],
)
def test_what_is_missing_is_said_in_one_line(command, said, rehearse, capsys):
    assert rehearse.main(["--config", f"{ROOT}/config/grpo.py:t2is", *command]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
