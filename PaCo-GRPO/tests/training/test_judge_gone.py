"""A judge that disappears during a run."""

import time

import pytest
from fakes import fake_judge
from tiny_run import rows_of, tiny_options, train

from paco_grpo.training import checkpoints as ckpt
from paco_grpo.training.resume import TrainingStopped

PAIRS = 8  # of an epoch: 8 images of two panels
PROOF = 1  # the question that a run begins with
DEADLINE = 1.5


def test_run_waits_stops_with_state_saved_and_resumes(tiny_flux_dir, tmp_path, caplog):
    asked = []
    back = []

    def respond(number, request):
        """Half of the second epoch is answered. Then connections are closed without an answer
        until the judge is back.
        """
        asked.append(number)
        gone = PROOF + PAIRS + PAIRS // 2 < len(asked) and not back
        return None if gone else (200, fake_judge.answer(0.1 + 0.8 * (len(asked) % 7) / 7), {})

    with fake_judge.FakeJudge(respond) as judge:
        kwargs = {
            "consistency_score": {
                "base_url": judge.url,
                "model": "Paco-Reward-7B",
                "deadline_s": DEADLINE,
            }
        }
        changes = {
            "train__reward_fn": "{'consistency_score': 1}",
            "train__reward_fn_kwargs": repr(kwargs),
            "test__reward_fn": "{'tiny_run:brightness': 1}",
            "save_freq": 0,
        }
        started = time.monotonic()
        with pytest.raises(TrainingStopped, match="epoch 2.*resume_from=latest"):
            train(tiny_options(tiny_flux_dir, tmp_path, **changes))
        assert time.monotonic() - started >= DEADLINE
        assert "no score" in caplog.text and judge.url in caplog.text  # the cause
        checkpoints = tmp_path / "runs" / "run" / "checkpoints"
        assert [path.name for path in ckpt.list_checkpoints(checkpoints)] == ["epoch_0001"]
        assert not (checkpoints / "epoch_0002").exists()

        back.append(True)
        before = len(asked)
        options = tiny_options(tiny_flux_dir, tmp_path, resume_from="latest", **changes)
        train(options)
        assert len(asked) - before == PROOF + PAIRS
    assert [row["reward/missing_share"] for row in rows_of(options, "train")] == [0, 0]
