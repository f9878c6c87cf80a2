"""A judge that stops answering: the run waits until the deadline, stops with its state saved, and can be resumed."""

import time
from pathlib import Path

import pytest
from fakes import fake_judge
from tiny_run import rows_of, tiny_options, train

from paco_grpo.checkpoint import files as ckpt
from paco_grpo.training.trainer import TrainingStopped

PAIRS = 8  # of an epoch: 8 images of two panels
DEADLINE = 1.5


def config_for(flux, folder, url, **changes):
    kwargs = {"consistency_score": {"base_url": url, "model": "Paco-Reward-7B", "deadline_s": DEADLINE}}
    return tiny_options(
        flux, folder, train__reward_fn="{'consistency_score': 1}", train__reward_fn_kwargs=repr(kwargs),
        test__reward_fn="{'tiny_run:brightness': 1}", num_epochs=2, save_freq=0, **changes,
    )  # fmt: skip


def test_it_waits_stops_with_state_saved_and_resumes(tiny_flux_dir, tmp_path, caplog):
    asked = []

    def respond(number, request):
        """Half of the second epoch is answered, then connections are closed without a word until the judge is back."""
        asked.append(number)
        gone = PAIRS + PAIRS // 2 < len(asked) and not back
        return None if gone else (200, fake_judge.answer(0.1 + 0.8 * (len(asked) % 7) / 7), {})

    back = []
    with fake_judge.FakeJudge(respond) as judge:
        started = time.monotonic()
        with pytest.raises(TrainingStopped, match="50% of the images of epoch 2 have no score.*resume_from=latest"):
            train(config_for(tiny_flux_dir, tmp_path, judge.url))
        assert time.monotonic() - started >= DEADLINE
        assert "no score" in caplog.text and judge.url in caplog.text  # the cause
        checkpoints = tmp_path / "runs" / "run" / "checkpoints"
        assert [path.name for path in ckpt.list_checkpoints(checkpoints)] == ["epoch_0001"]
        assert not (Path(checkpoints) / "epoch_0002").exists()

        back.append(True)
        before = len(asked)
        config = config_for(tiny_flux_dir, tmp_path, judge.url, resume_from="latest")
        train(config)
        assert len(asked) - before == PAIRS // 2  # the scores that had come in are not asked for again
    assert [row["reward/missing_share"] for row in rows_of(config, "train")] == [0, 0]
