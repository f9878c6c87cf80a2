"""Votes of people as the reward of a run, through the page's own requests."""

import json
import os
import signal
import time

import forked_runs
import pytest
from voter import Voter

from paco_judge.files import read_json_lines

VOTES = {
    "train__reward_fn": '{"votes": 1.0, "tiny_run:redness": 0.5}',
    "train__reward_fn_kwargs": '{"votes": {"port": 0}}',
    "train__sharding": "fsdp2",
    "test__reward_fn": '{"tiny_run:redness": 1.0}',
    "train__max_missing_reward_fraction": 0.0,
    "train__loss_type": "awm",
    "train__num_sigmas": 1,
    "sample__noise_level": 0.0,
    "sample__num_images_per_prompt": 6,
    "sample__batch_size": 1,
    "sample__unique_sample_num_per_epoch": 2,
    "train__gradient_step_per_epoch": 1,
    "num_epochs": 2,
    "max_train_minutes": 0.2,
    "timeout_s": 5,
}
IMAGES = 12


def answers(folder) -> dict:
    """(epoch, item, seed) → score, of the last line that says it."""
    rows = read_json_lines(folder / "runs" / "run" / "votes.jsonl")
    return {(row["epoch"], row["item"], row["seed"]): row["score"] for row in rows}


def test_people_may_take_longer_than_processes_wait_for_each_other(tiny_flux_dir, tmp_path):
    """A signal to one process without a group ends all while they wait. The resumed run shows the
    same images, and asks only for what has no answer.
    """
    stopped_s = []

    def vote_and_stop(started):
        voter = Voter(tmp_path / "stderr_0")
        voter.vote(1, IMAGES, pause_s=7)
        voter.vote(2, IMAGES, most=5)
        asked_at = time.monotonic()
        os.kill(started[3].pid, signal.SIGTERM)
        for process in started:
            process.join(60)
        stopped_s.append(time.monotonic() - asked_at)

    status = forked_runs.run(tiny_flux_dir, tmp_path, 4, meanwhile=vote_and_stop, **VOTES)
    assert status == [forked_runs.STOPPED] * 4 and stopped_s[0] < 10
    assert forked_runs.checkpoints(tmp_path) == ["epoch_0001"]
    log = (tmp_path / "runs/run/log.txt").read_text()
    assert "http://127.0.0.1:" in log and "key=" not in log
    first = json.loads((tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()[0])
    before = answers(tmp_path)
    given = [score for (epoch, *_), score in before.items() if epoch == 1 and score is not None]
    assert 0 < len(given) < IMAGES < len(before) == IMAGES + 5
    assert first["reward/votes_mean"] == pytest.approx(sum(given) / len(given))
    assert first["reward/missing_share"] == 0
    assert first["time/people_wait_s"] > 7 > first["time/epoch_s"] == first["train_time"]

    def vote_the_rest(started):
        voter = Voter(tmp_path / "stderr_0")
        pictures = voter.pictures(2, IMAGES)
        assert sum(picture["answer"] is not None for picture in pictures) == 5
        voter.vote(2, IMAGES)

    (tmp_path / "stderr_0").unlink()
    again = VOTES | {"resume_from": "latest"}
    assert forked_runs.run(tiny_flux_dir, tmp_path, 4, meanwhile=vote_the_rest, **again) == [0] * 4
    after = answers(tmp_path)
    assert before.items() <= after.items() and len(after) == 2 * IMAGES
    assert [row["epoch"] for row in forked_runs.rows(tmp_path) if row["phase"] == "train"] == [1, 2]
