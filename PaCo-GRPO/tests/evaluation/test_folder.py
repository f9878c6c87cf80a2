"""Only the evaluation that began in a folder continues there, or calls it complete."""

import dataclasses
import json
import shutil
from itertools import pairwise

import numpy as np
import pytest
from accelerate import Accelerator, PartialState
from fakes import fake_judge
from PIL import Image, ImageColor
from tiny_run import tiny_options

from paco_grpo.commands.evaluate import is_complete, prepare, record_evaluation
from paco_grpo.evaluation.folder import EvaluationFolder, contact_sheet
from paco_grpo.options import ConfigError
from paco_grpo.rewards.registry import build_rewards
from paco_grpo.types import Item

REWARDS = {"tiny_run:brightness": 1.0}


COLORS = ("red", "lime", "blue", "white", "black")
PROMPTS = ("in red dye it", "in red\npaint it", "in red bleach it", "in red burn it" + 60 * " well")


def test_an_edit_is_shown_beside_its_own_reference(tmp_path):
    """In rows of two, above its prompt and scores, and kept with a small copy of it."""
    PartialState()
    folder = EvaluationFolder(tmp_path)
    plain = [Image.new("RGB", (32, 32), color) for color in COLORS]
    edits = list(pairwise(plain))
    for number in (2, 0, 3, 1):  # batches of one size come in another order
        before, after = edits[number]
        folder.add(number, after, Item(number, PROMPTS[number], references=(before,)))
        kept = Image.open(folder.reference_file(number))
        assert kept.tobytes() == before.tobytes()
    scores = {"kept": np.array([0.5, np.nan, 0.25, 0.125]), "sharp": np.array([1, 2, 3, np.nan])}
    folder.write_sheet(True, scores)
    sheet = Image.open(tmp_path / "sheet.png")
    captions = [  # without the words that are in all prompts
        "0: … dye it\n0.500 kept\n1.000 sharp",
        "1: … paint it\n2.000 sharp\n",
        "2: … bleach it\n0.250 kept\n3.000 sharp",
        f"3: …{PROMPTS[3].removeprefix('in red')}\n0.125 kept\n",
    ]
    images = [after for _, after in edits]
    expected = contact_sheet(images, captions, [before for before, _ in edits])
    assert sheet.tobytes() == expected.tobytes()
    shown = [sheet.getpixel((x, y)) for y in (80, 286) for x in (80, 244, 416, 580)]
    colors = ("red", "lime", "lime", "blue", "blue", "white", "white", "black")
    assert shown == list(map(ImageColor.getrgb, colors))


def test_a_caption_stays_in_its_place():
    """Below its own image; a long prompt is cut."""
    image = Image.new("RGB", (32, 32), "red")
    texts = [f"{text} and so on" * 20 for text in ("long", "other")]
    sheet = contact_sheet([image, image], texts)
    left, right = (sheet.crop((x, 164, x + 164, sheet.height)) for x in (0, 164))
    assert left.tobytes() == contact_sheet([image], texts[:1]).crop((0, 164, 164, 178)).tobytes()
    assert right.tobytes() == contact_sheet([image], texts[1:]).crop((0, 164, 164, 178)).tobytes()
    assert left.tobytes() != right.tobytes()


class Case:
    """A complete evaluation without a generator: an image, and metrics as ``evaluate`` writes."""

    def __init__(self, model, tmp_path):
        self.folder = tmp_path / "out"
        self.model = shutil.copytree(model, tmp_path / "model")
        self.options = tiny_options(self.model, tmp_path)
        self.data = tmp_path / "prompts"
        self.rewards = build_rewards(REWARDS)
        self.adapter = tmp_path / "adapter"
        self.adapter.mkdir()
        (self.adapter / "a.safetensors").write_bytes(b"weights")
        assert not self.complete()
        self.record()
        Image.new("RGB", (8, 8)).save(self.folder / "00000.png")
        self.write_metrics(0.0)

    def write_metrics(self, missing_share):
        metrics = {"eval/missing_share": missing_share}
        (self.folder / "metrics.json").write_text(json.dumps(metrics))

    def record(self):
        record_evaluation(self.folder, self.options, self.rewards, self.adapter)

    def complete(self, continue_unknown=False):
        case = (self.folder, self.options, self.rewards, self.adapter)
        return is_complete(*case, continue_unknown)


@pytest.fixture
def case(tiny_flux_dir, tmp_path):
    case = Case(tiny_flux_dir, tmp_path)
    assert case.complete()
    return case


@pytest.mark.parametrize(
    ("group", "option", "value"),
    [
        ("", "seed", 7),
        ("pretrained", "quantize", "nf4"),
        ("sample", "guidance_scale", 1.25),
        ("test", "num_steps", 3),
    ],
)
def test_another_option_that_changes_images_is_refused(case, group, option, value):
    changed = {option: value}
    if group:
        changed = {group: dataclasses.replace(getattr(case.options, group), **changed)}
    case.options = dataclasses.replace(case.options, **changed)
    with pytest.raises(ConfigError, match=option):
        case.complete()


def test_options_that_change_no_image_are_not_compared(case):
    """Such as a smaller batch after running out of memory."""
    test = dataclasses.replace(case.options.test, batch_size=77, save_eval_images=False)
    case.options = dataclasses.replace(case.options, test=test, num_epochs=77)
    assert case.complete()


def _append(file, text):
    file.write_bytes(file.read_bytes() + text)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda case: _append(case.data / "test_metadata.jsonl", b'{"prompt": "c"}\n'), "data set"),
        (lambda case: _append(case.model / "scheduler/scheduler_config.json", b" "), "model"),
        (lambda case: (case.adapter / "a.safetensors").write_bytes(b"others!"), "adapter"),
    ],
)  # fmt: skip
def test_other_files_under_the_same_path_are_refused(case, change, what):
    change(case)
    with pytest.raises(ConfigError, match=rf"{what}.*--output"):
        case.complete()


def test_a_model_that_is_not_here_may_be_the_same(case):
    pretrained = dataclasses.replace(case.options.pretrained, model="org/absent")
    case.options = dataclasses.replace(case.options, pretrained=pretrained)
    with pytest.raises(ConfigError, match="same model .* is unknown.*--continue_unknown"):
        case.complete()
    assert case.complete(continue_unknown=True)


def test_what_an_earlier_version_wrote_is_called_that(case):
    record = case.folder / "evaluation.json"
    written = json.loads(record.read_text())
    earlier = {"model": "sha256:" + 32 * "0", "data set": None, "adapter": None}
    del written["format"]
    rewards = {name: [{}, None] for name in written["rewards"]}
    record.write_text(json.dumps(written | earlier | {"rewards": rewards}))
    with pytest.raises(ConfigError, match="adapter .an earlier.*brightness .an earlier"):
        case.complete()
    assert case.complete(continue_unknown=True)


def test_other_rewards_only_score_again(case):
    """A judge exchanged under its name is another; under another name or address it is not."""
    with fake_judge.FakeJudge(models=["one", "two"]) as server, fake_judge.FakeJudge() as other:
        server.identities = {"one": "o/a@1", "two": "o/a@2"}
        other.models = ["three"]
        other.identities = {"three": "o/a@2"}
        judges = [("one", server, False), ("two", server, False), ("three", other, True)]
        for model, at, is_same in judges:
            judge = {"model": model, "base_url": at.url}
            case.rewards = build_rewards({"consistency_score": 1.0}, {"consistency_score": judge})
            assert case.complete() == is_same
            case.record()
            case.write_metrics(0.0)
            assert case.complete()
        for identity, words in (("o/a@3", None), (None, "consistency_score .* is unknown")):
            other.identities = {"three": identity}
            case.rewards = build_rewards({"consistency_score": 1.0}, {"consistency_score": judge})
            if words is None:
                assert not case.complete()
                case.write_metrics(0.0)
                continue
            with pytest.raises(ConfigError, match=words):
                case.complete()
            assert case.complete(continue_unknown=True)
            case.rewards |= build_rewards({"jpeg_compressibility": 1.0})
            assert not case.complete()  # all score again


def test_what_was_asked_is_written_when_an_evaluation_begins(case):
    """One that is then refused changes no file."""
    with fake_judge.FakeJudge(models=["mine"]) as server:
        server.identities = {"mine": "o/a@4"}
        judge = {"model": "mine", "base_url": server.url}
        rewards = {"reward_fn": {"consistency_score": 1.0}}
        arguments = {"reward_fn_kwargs": {"consistency_score": judge}}
        test = dataclasses.replace(case.options.test, **rewards, **arguments)
        options = dataclasses.replace(case.options, test=test)
        before = {file: file.read_bytes() for file in case.folder.iterdir()}
        prepared = prepare(options, Accelerator(cpu=True), case.folder, 1)
        assert {file: file.read_bytes() for file in case.folder.iterdir()} == before
        record_evaluation(case.folder, options, prepared.rewards, case.adapter)
    asked = json.loads((case.folder / "questions.json").read_text())
    assert asked["consistency_score"]["weights"] == "o/a@4"


def test_a_users_reward_is_its_code(case, tmp_path):
    file = tmp_path / "mine.py"
    for level, is_same in ((1.0, False), (1.0, True), (0.5, False)):
        file.write_text(
            f"def bright():\n    return lambda images, items: [{level}] * len(images)\n"
        )
        case.rewards = build_rewards({f"{file}:bright": 1.0})
        assert case.complete() == is_same
        case.record()
        case.write_metrics(0.0)


def test_missing_scores_are_asked_for_again(case):
    case.write_metrics(0.2)
    assert not case.complete()
