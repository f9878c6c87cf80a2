"""Only the evaluation that began in a folder continues there, or calls it complete."""

import dataclasses
import json
import shutil

import pytest
from PIL import Image
from tiny_run import tiny_options, write_prompts

from paco_grpo.data.prompts import load_prompts
from paco_grpo.evaluation import folder as evaluation_folder
from paco_grpo.evaluation.folder import is_complete
from paco_grpo.options import ConfigError
from paco_grpo.rewards.registry import build_rewards

REWARDS = {"tiny_run:brightness": 1.0}


class Case:
    """A complete evaluation without a generator: images and files as ``evaluate`` writes them."""

    def __init__(self, model, tmp_path):
        self.folder = tmp_path / "out"
        self.options = tiny_options(model, tmp_path, test__num_images="None")
        self.items = load_prompts(self.options.dataset, "test", self.options.prompt_fn)
        self.rewards = build_rewards(REWARDS)
        self.adapter = None
        assert not self.complete()
        for number in range(len(self.items)):
            Image.new("RGB", (8, 8)).save(self.folder / f"{number:05d}.png")
        self.write_rows([{"rewards": {"brightness": 0.5}} for _ in self.items])
        (self.folder / "metrics.json").write_text("{}")

    def write_rows(self, rows):
        lines = [json.dumps(row) + "\n" for row in rows]
        (self.folder / "eval_data.jsonl").write_text("".join(lines))

    def complete(self):
        return is_complete(self.folder, self.options, self.items, self.rewards, self.adapter)


@pytest.fixture
def case(tiny_flux_dir, tmp_path):
    return Case(tiny_flux_dir, tmp_path)


def test_the_same_evaluation_is_complete(case):
    assert case.complete()
    assert case.complete()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("mixed_precision", "bf16"),
        ("allow_tf32", False),
        ("item_size", "exact"),
        ("seed", 7),
        ("max_sequence_length", 17),
        ("pretrained.quantize", "nf4"),
        ("speed.attention", "native"),
        ("speed.compile", True),
        ("sample.guidance_scale", 1.25),
        ("sample.negative_prompt", "blurry"),
        ("test.resolution", 64),
        ("test.num_steps", 3),
        ("test.seed", 5),
        ("test.num_images", 2),
    ],
)
def test_another_option_that_changes_images_is_refused(case, option, value):
    *group, name = option.split(".")
    changed = {name: value}
    if group:
        inner = getattr(case.options, group[0])
        changed = {group[0]: dataclasses.replace(inner, **changed)}
    case.options = dataclasses.replace(case.options, **changed)
    named = "test" if group == ["test"] else name
    with pytest.raises(ConfigError, match=rf"{named}.*choose another --output"):
        case.complete()
    assert (case.folder / "metrics.json").is_file()


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "another"},
        {"height": 64},
        {"width": 64},
        {"metadata": {"criteria": {"style": {"a": "b"}}}},
        {"metadata": {"open": True}},
        {"metadata": {"category": "new"}},
    ],
)
def test_other_items_are_refused(case, change):
    case.items[1] = dataclasses.replace(case.items[1], **change)
    with pytest.raises(ConfigError, match="prompts"):
        case.complete()


def test_other_reference_images_are_refused(tiny_flux_dir, tmp_path):
    rows = [{"prompt": "make it red", "image": "a.png"}]
    data = tmp_path / "edits"
    data.mkdir()
    (data / "test_metadata.jsonl").write_text(json.dumps(rows[0]))
    Image.new("RGB", (8, 8), "blue").save(data / "a.png")
    case = Case(tiny_flux_dir, tmp_path)
    case.options = dataclasses.replace(case.options, dataset=str(data))
    case.items = load_prompts(data, "test", "geneval_image")
    case.folder = tmp_path / "edited"
    assert not case.complete()
    Image.new("RGB", (8, 8), "red").save(data / "a.png")
    with pytest.raises(ConfigError, match="prompts"):
        case.complete()


def test_other_weights_under_the_same_path_are_refused(tiny_flux_dir, tmp_path):
    model = shutil.copytree(tiny_flux_dir, tmp_path / "model")
    case = Case(model, tmp_path)
    weights = model / "vae" / "diffusion_pytorch_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ConfigError, match="weights"):
        case.complete()


def test_another_adapter_is_refused_and_the_same_one_elsewhere_is_not(case, tmp_path):
    case.folder = tmp_path / "adapted"
    case.adapter = tmp_path / "one"
    case.adapter.mkdir()
    (case.adapter / "a.safetensors").write_bytes(b"weights")
    assert not case.complete()
    case.adapter = shutil.copytree(case.adapter, tmp_path / "copy")
    assert not case.complete()
    (case.adapter / "a.safetensors").write_bytes(b"others")
    with pytest.raises(ConfigError, match="adapter_sha256"):
        case.complete()


def test_other_rewards_only_score_again(case):
    case.rewards = build_rewards(REWARDS, {"tiny_run:brightness": {"scale": 2.0}})
    assert not case.complete()
    assert not (case.folder / "metrics.json").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "\x00\x00"])
def test_a_damaged_record_is_one_message(case, content):
    (case.folder / "evaluation.json").write_text(content)
    with pytest.raises(ConfigError, match=r"evaluation.json is damaged .* choose another --output"):
        case.complete()


def test_a_record_that_is_a_folder_is_one_message(case):
    (case.folder / "evaluation.json").unlink()
    (case.folder / "evaluation.json").mkdir()
    with pytest.raises(ConfigError, match="evaluation.json is damaged"):
        case.complete()


def test_images_without_a_record_are_refused(case):
    (case.folder / "evaluation.json").unlink()
    with pytest.raises(ConfigError, match="another model"):
        case.complete()


@pytest.mark.parametrize(
    "damage",
    [
        lambda case: (case.folder / "eval_data.jsonl").unlink(),
        lambda case: (case.folder / "eval_data.jsonl").write_text(""),
        lambda case: (case.folder / "eval_data.jsonl").write_text('{"rewards": {"bri'),
        lambda case: (case.folder / "eval_data.jsonl").write_bytes(b"\xff\xfe\n"),
        lambda case: case.write_rows([{"rewards": {"brightness": 0.5}}]),
        lambda case: case.write_rows([{"rewards": {"brightness": None}}] * len(case.items)),
        lambda case: case.write_rows([{"rewards": {}}] * len(case.items)),
        lambda case: case.write_rows([[]] * len(case.items)),
        lambda case: (case.folder / "metrics.json").unlink(),
    ],
)
def test_scores_that_are_damaged_or_missing_are_made_again(case, damage):
    damage(case)
    assert not case.complete()


def test_a_hub_name_is_known_by_its_commit(monkeypatch, tmp_path):
    index = tmp_path / "models--a--b" / "snapshots" / "0123abc" / "model_index.json"
    monkeypatch.setattr(evaluation_folder, "try_to_load_from_cache", lambda *_: str(index))
    assert evaluation_folder._weights_identity("a/b") == "0123abc"


def test_prompts_of_a_set_are_loaded_alike(tmp_path):
    """The identity does not depend on where the set lies."""
    contents = []
    for name in ("one", "two"):
        items = load_prompts(write_prompts(tmp_path / name), "test", "geneval")
        contents.append([evaluation_folder._item_content(item, "") for item in items])
    assert contents[0] == contents[1]
