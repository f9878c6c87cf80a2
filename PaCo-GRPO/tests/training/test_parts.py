"""EMA, scoring queue, batches by size, checkpoint folders, metrics file: the parts of a run on their own."""

import json
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paco_grpo.checkpoint import files as ckpt
from paco_grpo.checkpoint.ema import EMA
from paco_grpo.distributed.collectives import Stopped
from paco_grpo.distributed.replicated import Replicated
from paco_grpo.evaluation.evaluate import evaluation_set, summarize
from paco_grpo.monitoring.trackers import MetricsFile
from paco_grpo.rewards.queue import ScoringError, ScoringQueue
from paco_grpo.sampling.images import batches_by_key
from paco_grpo.types import Item


@pytest.mark.parametrize(("interval", "limit"), [(1, 0.9), (3, 0.2)])
def test_ema_against_numpy(interval, limit):
    rng = np.random.default_rng(0)
    parameter = torch.nn.Parameter(torch.from_numpy(rng.normal(size=4)).float())
    ema = EMA({"w": parameter}, limit, interval)
    expected = parameter.detach().numpy().astype(np.float64)
    for step in range(1, 20):
        weights = rng.normal(size=4)
        parameter.data = torch.from_numpy(weights).float()
        ema.update(step)
        if step % interval == 0:
            decay = min((1 + step) / (10 + step), limit)
            expected = decay * expected + (1 - decay) * weights
    np.testing.assert_allclose(ema.shadow["w"].numpy(), expected, rtol=1e-5)
    before = parameter.detach().clone()
    with ema.applied():
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-5)
    assert torch.equal(parameter, before)
    with pytest.raises(KeyError, match="other parameters"):
        ema.load_state_dict({"v": torch.zeros(4)})


def test_scoring_runs_in_the_background_and_keeps_rows():
    gate = threading.Event()

    def slow(images, items):
        gate.wait(5)
        return np.array(images, dtype=float)

    queue = ScoringQueue(
        {"slow": slow, "double": lambda images, items: 2 * np.array(images, dtype=float)}, batch_size=2
    )
    queue.submit([10, 11, 12], [None] * 3, [2, 0, 1])
    queue.submit([13], [None], [3])
    gate.set()  # reached before anything slow was answered: submitting did not wait
    assert queue.results(5)[:4].tolist() == [[11, 22], [12, 24], [10, 20], [13, 26]]
    assert np.isnan(queue.results(1)).all()
    queue.close()


def test_scoring_batches_are_as_large_as_asked():
    sizes = []
    queue = ScoringQueue({"r": lambda images, items: sizes.append(len(images)) or np.zeros(len(images))}, batch_size=2)
    queue.submit([1, 2, 3, 4, 5], [None] * 5, range(5))
    queue.results(5)
    assert sizes == [2, 2, 1]


def test_scoring_names_the_reward_that_failed_and_can_be_interrupted():
    def failing(images, items):
        raise ConnectionError("gone")

    queue = ScoringQueue({"judge": failing})
    queue.submit([1], [None], [0])
    with pytest.raises(ScoringError, match="judge: ConnectionError: gone") as caught:
        queue.results(1)
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert queue.failed()
    queue = ScoringQueue({"slow": lambda images, items: time.sleep(0.3) or np.zeros(1)})
    queue.submit([1], [None], [0])
    with pytest.raises(Stopped):
        queue.results(1, should_stop=lambda: True)


@given(st.lists(st.sampled_from([(8, 8), (8, 16), (16, 16)]), max_size=30), st.integers(1, 7))
def test_batches_hold_one_size_each_and_are_as_few_as_possible(sizes, batch_size):
    batches = batches_by_key(sizes, batch_size)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))
    assert all(0 < len(batch) <= batch_size and len({sizes[i] for i in batch}) == 1 for batch in batches)
    assert len(batches) == sum(-(-sizes.count(size) // batch_size) for size in set(sizes))


def test_evaluation_set_repeats_items_with_new_seeds():
    items = [Item(i, str(i)) for i in range(3)]
    chosen = evaluation_set(items, 7, seed=5)
    assert [item.item_id for item, _ in chosen] == [0, 1, 2, 0, 1, 2, 0]
    assert len({seed for _, seed in chosen}) == 7
    assert evaluation_set(items, None, 5) == chosen[:3]
    assert {s for _, s in evaluation_set(items, 7, 6)}.isdisjoint(s for _, s in chosen)


def test_summary_against_numpy():
    scores = np.array([[1.0, 5.0], [3.0, np.nan], [8.0, 6.0]])
    summary = summarize(scores, ["a", "b"])
    assert summary["eval/a_mean"] == pytest.approx(4.0)
    assert summary["eval/a_stderr"] == pytest.approx(np.std([1, 3, 8], ddof=1) / np.sqrt(3))
    assert (summary["eval/b_mean"], summary["eval/num_images"]) == (5.5, 3)
    assert summary["eval/missing_share"] == pytest.approx(1 / 3)


def fake_checkpoint(root, epoch):
    (root / ckpt.checkpoint_name(epoch) / "state").mkdir(parents=True)
    (root / ckpt.checkpoint_name(epoch) / "state" / "trainer.json").write_text("{}")


def test_the_newest_checkpoints_are_kept_by_number(tmp_path):
    for epoch in (9, 10000, 11, 2):
        fake_checkpoint(tmp_path, epoch)
    (tmp_path / ".epoch_0099.partial" / "state").mkdir(parents=True)
    (tmp_path / "epoch_0050").mkdir()  # without state: not finished by us
    ckpt.prune(tmp_path, 2)
    assert [path.name for path in ckpt.list_checkpoints(tmp_path)] == ["epoch_0011", "epoch_10000"]


def test_finding_a_checkpoint(tmp_path):
    run = tmp_path / "run"
    assert ckpt.find_checkpoint("latest", run) is None
    fake_checkpoint(run / "checkpoints", 3)
    fake_checkpoint(run / "checkpoints", 4)
    newest = run / "checkpoints" / "epoch_0004"
    assert ckpt.find_checkpoint("latest", run) == newest
    assert ckpt.find_checkpoint(str(run), tmp_path) == newest
    assert ckpt.find_checkpoint(str(run / "checkpoints" / "epoch_0003"), run).name == "epoch_0003"
    with pytest.raises(ckpt.CheckpointError, match="holds no checkpoint"):
        ckpt.find_checkpoint(str(tmp_path / "nothing"), run)


def test_an_epoch_written_again_replaces_the_old_one(tmp_path):
    for text in ("old", "new"):
        writer = ckpt.CheckpointWriter(tmp_path, "epoch_0001")
        writer.begin()
        (writer.folder / "state" / "trainer.json").write_text(text)
        writer.commit()
    assert (tmp_path / "epoch_0001" / "state" / "trainer.json").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch_0001"]


def test_generators_come_back(tmp_path):
    torch.manual_seed(3)
    np.random.seed(3)
    ckpt.save_rng(tmp_path, 0, ckpt.capture_rng())
    drawn = torch.rand(3), np.random.rand(3)
    ckpt.load_rng(tmp_path, 0)
    assert torch.equal(torch.rand(3), drawn[0])
    assert np.array_equal(np.random.rand(3), drawn[1])


def test_optimizer_state_comes_back(tmp_path):
    def build():
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(2, 2))]
        return parameters, torch.optim.AdamW(parameters, lr=0.1, betas=(0.8, 0.9))

    def step(parameters, optimizer, seed):
        generator = torch.Generator().manual_seed(seed)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()

    one, optimizer = build()
    step(one, optimizer, 1)
    ckpt.save_optimizer(tmp_path, Replicated(None).optimizer_state(optimizer))
    two, again = build()
    step(two, again, 1)
    fresh = torch.optim.AdamW(two, lr=0.5)
    Replicated(None).load_optimizer_state(fresh, ckpt.load_optimizer(tmp_path))
    step(one, optimizer, 2)
    step(two, fresh, 2)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"junk")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ckpt.CheckpointError, match="x.safetensors cannot be read"):
        ckpt.load_tensors(tmp_path / "x.safetensors")
    with pytest.raises(ckpt.CheckpointError, match="x.json cannot be read"):
        ckpt.load_json(tmp_path / "x.json")


def test_metrics_continue_where_the_run_resumes(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for epoch in range(4):
        metrics.write({"epoch": epoch, "phase": "eval" if epoch == 2 else "train"})
    with metrics.path.open("a") as file:
        file.write('{"epoch": 4, "pha')  # killed while writing
    assert [row["epoch"] for row in metrics.rows("eval")] == [2] and len(metrics.rows()) == 4
    metrics.keep_until(1)
    assert [json.loads(line)["epoch"] for line in metrics.path.read_text().splitlines()] == [0, 1]
