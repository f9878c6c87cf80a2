"""What the benchmarks share: batches, resuming, results files, engines that fail."""

import json
import math
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from bench_tools import RANK_FOLDER, ContentJudge
from fakes import fake_judge
from pairing_tools import write_lines
from PIL import Image

from paco_eval.edit import command_line
from paco_eval.judges import ServerEngine, VllmEngine, make_engine
from paco_judge.errors import UserError
from paco_judge.images import as_received
from paco_judge.questions import Pair, RequestForm
from paco_judge.scorer import JudgeScorer

IMAGE = Image.new("RGB", (8, 8))
STOPPED = 130


def test_a_stopped_run_continues(edits):
    whole = ContentJudge()
    assert edits(whole) == 0
    expected = edits.rows
    edits.file.unlink()

    assert edits(ContentJudge(stop_after=1)) == STOPPED
    early = edits.rows
    assert 0 < len(early) < 5 and early == expected[: len(early)]
    with edits.file.open("a") as file:
        file.write('{"model": "some/judge", "index": 1')  # killed while writing

    rest = ContentJudge()
    assert edits(rest) == 0 and edits.rows == expected
    assert [row["index"] for row in expected] == list(range(20))
    assert 0 < len(rest.questions) < len(whole.questions)
    assert edits(ContentJudge(stop_after=0)) == 0, "nothing is left to ask"


BENCH = "data/ConsistencyRank-Bench"


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("judge/model.safetensors", "judge", "other"),
        ("adapter/adapter_model.safetensors", "adapter", "other"),
        (f"{BENCH}/consistency_full_rank.jsonl", '"b1.png", "a1.png"', '"a1.png", "b1.png"'),
        (f"{BENCH}/prompt_data.jsonl", "of 12 cats", "of 13 cats"),
    ],
)
def test_results_of_other_weights_or_items_are_not_continued(
    rank, tmp_path, file, old, new, monkeypatch
):
    """Of other files at the same path."""
    for name, prefix in (("judge", ""), ("adapter", "adapter_")):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{prefix}model.safetensors").write_text(name)
    (tmp_path / "mine.txt").write_text("Same {theme}?")
    options = ["--model", tmp_path / "judge", "--question", tmp_path / "mine.txt"]
    adapter = ["--adapter", tmp_path / "adapter"]
    with pytest.raises(SystemExit):
        rank(ContentJudge(), *options, *adapter)  # vLLM takes none here
    options += [*adapter, "--engine", "transformers"]
    rank.file = rank.file.with_name("judge+adapter-vmine.jsonl")
    assert rank(ContentJudge(), *options) == 0
    before = rank.file.read_bytes()
    content = (tmp_path / file).read_text()
    assert old in content
    for text, status in ((content.replace(old, new), 1), (content, 0)):
        (tmp_path / file).write_text(text)
        assert rank(ContentJudge(stop_after=0), *options) == status
        assert rank.file.read_bytes() == before
    monkeypatch.setenv("VLLM_MAX_PIXELS", "5000")
    assert rank(ContentJudge(stop_after=0), *options) == 1, "images were larger"


def test_results_of_a_judge_exchanged_under_its_name_are_not_shown(rank, capsys):
    """A server says whose answers it gives, or the user says that they are the same."""
    rank.file = rank.file.with_name("Judge-v3.jsonl")
    with fake_judge.FakeJudge(fake_judge.by_content, models=["Judge"]) as server:
        options = ["--server", server.url, "--model", "Judge"]
        for before, now, status, text in (
            ("o/a@1", "o/a@1", 0, "5 already"),
            ("o/a@1", "o/a@2", 1, "something else (weights)"),
            ("o/a@1", None, 1, "unknown"),
            (None, "o/a@1", 1, "--continue_unknown"),
            (None, None, 1, "--continue_unknown"),
        ):
            rank.file.unlink(missing_ok=True)
            server.identities = {"Judge": before}
            assert rank.main(*options) == 0
            rows = rank.rows[:3]
            assert {row["weights"] for row in rows} == {before}
            write_lines(rank.file, rows if status else rank.rows)
            server.identities = {"Judge": now}
            capsys.readouterr()
            assert rank.main(*options) == status
            assert text in "".join(capsys.readouterr())
            assert len(rank.rows) == (3 if status else 5)
        assert rank.main(*options, "--continue_unknown") == 0
        assert len(rank.rows) == 5
        write_lines(rank.file, [row | {"weights": [None]} for row in rank.rows])
        assert rank.main(*options) == 1
        assert "earlier version" in "".join(capsys.readouterr())


def test_an_item_that_the_engine_refuses_does_not_affect_its_batch(rank, capsys):
    class Refusing(ContentJudge):
        def __call__(self, pairs):
            if any(pair.image_b.width == 300 for pair in pairs):
                raise ValueError("absolute aspect ratio must be smaller")
            return super().__call__(pairs)

    Image.new("RGB", (300, 1)).save(rank.data / "images" / "0019" / "c2.png")
    assert rank(Refusing(), "--batch_size", "16") == 1
    assert "item 2 0019 r2.png: " in capsys.readouterr().err
    assert [row["index"] for row in rank.rows] == [0, 1, 3, 4]


def test_the_judge_is_the_one_of_the_command_line(judge_dir, adapter_dir, tiny):
    """With its adapter, and asked in the stated form, in this process as at a server.

    Yes and No of the random judge are not among the tokens that a server would report.
    """
    pairs = [Pair(tiny.picture(1), tiny.picture(2), "same?")]
    form = ["--image_labels", "<img{n}>: "]
    words = ["--engine", "transformers", "--model", str(judge_dir), "--adapter", str(adapter_dir)]
    engine = make_engine(command_line([*words, *form]))
    assert not engine(pairs)[0].ok
    labeled = RequestForm("<img{n}>: ")
    scorer = JudgeScorer.from_pretrained(judge_dir, adapter_dir, form=labeled)
    assert engine(pairs, top=None) == scorer.score(pairs, top=None)
    with fake_judge.FakeJudge(models=["judge"]) as judge:
        make_engine(command_line(["--server", judge.url, "--model", "judge", *form]))(pairs)
    assert judge.requests[0]["messages"][0]["content"][0]["text"] == "<img1>: "


def test_vllm_is_asked_in_the_stated_form_and_answers_in_order(tiny):
    """Here stands an object with its interface; the real one: test_bench_engines.py."""
    asked = []

    def token(text, share):
        return SimpleNamespace(decoded_token=text, logprob=math.log(share))

    def chat(chats, sampling, **options):
        asked.extend(chats)
        outputs = []
        for number in range(len(chats)):
            share = 0.2 + number / 10
            tokens = {7: token("yes", share), 8: token("no", 1 - share)}
            first = SimpleNamespace(logprobs=[tokens])
            outputs.append(SimpleNamespace(outputs=[first]))
        return outputs

    engine = VllmEngine.__new__(VllmEngine)
    engine._form = RequestForm("<img{n}>: ", "jpeg", "variants")
    engine._llm = SimpleNamespace(chat=chat)
    engine._sampling = None
    images = [tiny.picture(number) for number in range(3)]
    verdicts = engine([Pair(images[0], images[1], "same?"), Pair(images[1], images[2], "really?")])
    assert [verdict.p_yes for verdict in verdicts] == pytest.approx([0.2, 0.3])
    shown = [list(part.values())[1] for part in asked[1][0]["content"]]
    assert shown[::2] == ["<img1>: ", "<img2>: ", "really?"]
    assert shown[1::2] == [as_received(image, "jpeg") for image in images[1:]]


@pytest.mark.parametrize(
    ("allowed", "limit"),
    [("", {"max_pixels": 2_097_152}), ("5000", {"max_pixels": 5000}), ("0", None)],
)
def test_vllm_shrinks_images_as_a_server(judge_dir, tmp_path, monkeypatch, allowed, limit):
    folder = shutil.copytree(judge_dir, tmp_path / "judge")
    file = folder / "processor_config.json"
    settings = json.loads(file.read_bytes())
    settings["image_processor"]["size"]["longest_edge"] = 12_845_056
    file.write_text(json.dumps(settings))
    started = []
    vllm = SimpleNamespace(LLM=lambda **options: started.append(options), SamplingParams=dict)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    platform = SimpleNamespace(is_cpu=lambda: False)
    platforms = SimpleNamespace(current_platform=platform)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setattr("paco_eval.judges.VLLM_SETTINGS", {})
    monkeypatch.setenv("VLLM_MAX_PIXELS", allowed)
    for model in (folder, judge_dir):
        VllmEngine(str(model), 1, 0.5, RequestForm())
    assert [options.get("mm_processor_kwargs") for options in started] == [limit, None]


def test_a_server_that_goes_away_ends_the_run():
    with fake_judge.FakeJudge(models=["judge"]) as judge:
        engine = ServerEngine(judge.url, "judge", RequestForm(), deadline_s=0.5)
    with pytest.raises(UserError, match=judge.url):
        engine([Pair(IMAGE, IMAGE, "?")])


def test_missing_packages_are_one_sentence():
    """An interpreter without the packages of the environment."""
    bare = [sys.executable, "-ES", RANK_FOLDER / "eval_vllm.py", "--help"]
    run = subprocess.run(bare, capture_output=True, text=True, check=False)
    assert run.returncode == 1 and "pip install -r " in run.stderr
