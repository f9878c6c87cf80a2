"""What the benchmarks share: batches, resuming, results files, engines that fail."""

import subprocess
import sys

import pytest
from bench_tools import RANK_FOLDER, BrightnessJudge, edit_lines
from evaluation import command_line
from fakes import fake_judge
from PIL import Image

from paco_eval.engines import make_engine, server_engine
from paco_eval.results import BenchError
from paco_eval.runner import GIVE_UP_AFTER, Item, score_items
from paco_judge.client import JudgeError, Pair
from paco_judge.questions import RequestForm
from paco_judge.scorer import JudgeScorer
from paco_judge.verdict import Verdict

IMAGE = Image.new("RGB", (8, 8))


def test_a_stopped_run_continues(edits):
    assert edits(BrightnessJudge(stop_after=1)) == 130
    early, judge, again, whole = edits.rows, BrightnessJudge(), BrightnessJudge(), BrightnessJudge()
    assert 0 < len(early) < 5
    edits.file.write_bytes(
        edits.file.read_bytes() + b'{"model": "some/judge", "index": 1'
    )  # killed while writing
    assert edits(judge) == 0
    rows = edits.rows
    assert rows[: len(early)] == early and [row["index"] for row in rows] == list(range(20))
    assert edits(again) == 0 and again.batches == [] and edits.rows == rows
    edits.file.unlink()
    assert edits(whole) == 0 and edits.rows == rows
    assert 0 < sum(judge.batches) < sum(whole.batches)


@pytest.mark.parametrize("change", [{"model": "other/judge"}, {"dimension": "overall"}])
def test_results_of_something_else_are_not_mixed(change, edits, capsys):
    assert edits(BrightnessJudge(stop_after=1)) == 130
    edit_lines(edits.file, {0: lambda row: row | change})
    before = edits.file.read_text()
    assert edits(BrightnessJudge()) == 2
    assert "line 1" in capsys.readouterr().err and edits.file.read_text() == before


def test_other_weights_at_the_same_path_do_not_take_over_results(rank, tmp_path, monkeypatch):
    """The last byte of a large file is enough; the same weights elsewhere, or downloaded after the first rows, continue."""
    model = tmp_path / "models" / "judge"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(bytes(10**6) + b"a")
    assert rank(BrightnessJudge(stop_after=1), "--model", model) == 130
    before = rank.file.read_bytes()
    (model / "model.safetensors").write_bytes(bytes(10**6) + b"b")
    assert rank(BrightnessJudge(), "--model", model) == 2 and rank.file.read_bytes() == before
    (model / "model.safetensors").write_bytes(bytes(10**6) + b"a")
    model = model.parent.rename(tmp_path / "moved") / "judge"
    assert rank(BrightnessJudge(), "--model", model) == 0 and rank.file.read_bytes().startswith(
        before
    )
    rank.file.unlink()
    assert rank(BrightnessJudge(stop_after=1)) == 130
    before = rank.file.read_bytes()
    monkeypatch.setattr("paco_eval.runner.fingerprint", lambda *places: "sha256:0")
    assert rank(BrightnessJudge()) == 0 and rank.file.read_bytes().startswith(before)


def test_an_item_that_the_engine_refuses_does_not_affect_its_batch(rank, capsys):
    class Refusing(BrightnessJudge):
        def __call__(self, pairs):
            if any(pair.image_b.width == 300 for pair in pairs):
                raise ValueError("absolute aspect ratio\nmust be smaller")
            return super().__call__(pairs)

    Image.new("RGB", (300, 1)).save(rank.data / "images" / "0002" / "c1.png")
    assert rank(Refusing(), "--batch_size", "16") == 1
    assert (
        "item 2 0002 ref.png: the engine failed: ValueError: absolute aspect ratio\n"
        in capsys.readouterr().err
    )
    assert [row["index"] for row in rank.rows] == [0, 1, 3, 4]


def test_an_engine_that_always_fails_ends_the_run():
    def engine(pairs):
        if len(found) == 9:
            return [Verdict(0.5)] * len(pairs)
        raise RuntimeError("CUDA error: device-side assert\nlong explanation")

    found = []
    items = [
        Item({"index": index}, lambda: ([Pair(IMAGE, IMAGE, "?")], lambda values: {}))
        for index in range(99)
    ]
    with pytest.raises(BenchError, match="RuntimeError: CUDA error.*assert$"):
        found.extend(score_items(items, engine, 1))
    assert len(found) == 10 + GIVE_UP_AFTER  # a success between failures starts the count again


@pytest.mark.parametrize(
    "arguments, named",
    [
        ((), "--engine transformers"),
        (("--server", "http://127.0.0.1:9"), "http://127.0.0.1:9"),
        (("--model", "./none", "--engine", "transformers"), "./none"),
        (("--adapter", "a"), "--adapter"),
    ],
)
def test_unavailable_engines(arguments, named, rank, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert rank.main("--model", "some/judge", *arguments) == 2
    assert named in capsys.readouterr().err


def test_the_transformers_engine_scores_as_a_server_would(judge_dir, answering_judge, scorer, tiny):
    """Only the second judge has Yes and No among its top 20 tokens."""
    pairs = [Pair(tiny.picture(i), tiny.picture(i + 1), "same?") for i in range(3)]
    for model, judge in (
        (judge_dir, scorer),
        (answering_judge, JudgeScorer.from_pretrained(answering_judge)),
    ):
        engine = make_engine(
            command_line(["--engine", "transformers", "--model", str(model), "--batch_size", "2"])
        )
        expected = [verdict.p_yes for verdict in judge.score(pairs, top=20)]
        assert [verdict.p_yes for verdict in engine(pairs)] == pytest.approx(expected, abs=1e-5)
        assert (None in expected) == (model == judge_dir)


def test_a_server_and_one_that_goes_away(edits):
    judge = fake_judge.FakeJudge(models=["PaCo-Reward-7B"])
    with judge:
        assert edits.main("--server", judge.url) == 0
        engine = server_engine(judge.url, "PaCo-Reward-7B", RequestForm(), deadline_s=0.5)
    edits.file = edits.file.with_name("PaCo-Reward-7B.jsonl")
    assert [row["scores"] for row in edits.rows] == [pytest.approx([0.75, 0.75])] * 20
    with pytest.raises(JudgeError, match=judge.url):
        engine([Pair(IMAGE, IMAGE, "a question that was not asked before")])


def test_missing_packages_are_one_sentence():
    """An interpreter without the packages of the environment."""
    bare = [sys.executable, "-ES", RANK_FOLDER / "eval_vllm.py", "--help"]
    run = subprocess.run(bare, capture_output=True, text=True, check=False)
    assert run.returncode == 1 and ", scipy, tqdm, pillow; run: pip install -r " in run.stderr
