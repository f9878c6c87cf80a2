"""A repeated training resumes, and its adapter loads as on the card."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from peft import PeftModel
from qwen_vl_utils import process_vision_info
from training_tools import adapter, losses, run_processes, train_config
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

from paco_judge.errors import UserError
from paco_judge.files import locked
from paco_judge.questions import Pair, theme_question
from paco_judge.scorer import JudgeScorer
from paco_reward.datasets import check_data
from paco_reward.launch import DATA, MODEL, run, weights_of, with_resume


@pytest.mark.parametrize(
    ("files", "added"),
    [
        (
            "9/trainer_state.json 20/trainer_state.json 30/trainer_state.json 10/trainer_state.json",
            {"resume_from_checkpoint": "checkpoint-30"},
        ),
        ("9/trainer_state.json 10/optimizer.pt", {"resume_from_checkpoint": "checkpoint-9"}),
        ("9/optimizer.pt", {"overwrite_output_dir": True}),  # cut off
        ("", {}),
    ],
)
def test_the_newest_whole_checkpoint_is_resumed(tmp_path, monkeypatch, files, added):
    monkeypatch.chdir(tmp_path)
    for name in files.split():
        file = Path("out", f"checkpoint-{name}")
        file.parent.mkdir(parents=True)
        file.touch()
    if "resume_from_checkpoint" in added:
        added = {"resume_from_checkpoint": f"out/{added['resume_from_checkpoint']}"}
    config = {"output_dir": "out", "do_train": True}
    assert with_resume(config) == config | added
    Path("out").mkdir(exist_ok=True)
    Path("out", "adapter_model.safetensors").touch()
    if files:
        assert with_resume(config) == config | added
    else:
        with pytest.raises(UserError, match="overwrite_output_dir"):
            with_resume(config)


def test_other_options_or_data_than_the_resumed_training_had_are_named(tiny, tmp_path, caplog):
    folder = tiny.save_pairs(tmp_path / "data", 3)
    data = {"dataset_dir": str(folder), "dataset": "pairs"}
    content = check_data(data)
    file = folder / "pairs.json"
    file.write_text(json.dumps(json.loads(file.read_text())))
    assert check_data(data) == content
    file.write_text(file.read_text().replace("No. ", "Yes. "))
    state = tmp_path / "checkpoint-3" / "trainer_state.json"
    state.parent.mkdir()
    state.touch()
    before = {"learning_rate": 1e-4, "seed": 7, "dataset": "a", "overwrite_output_dir": True}
    before |= {DATA: content, MODEL: "o/a@1"}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(before))
    config = {"output_dir": str(tmp_path), "do_train": True, "learning_rate": 2e-4, "seed": 7}
    with_resume(config | {DATA: check_data(data), MODEL: "o/a@1"})
    assert f"another dataset, {DATA}, do_train, learning_rate, output_dir;" in caplog.text
    assert "unknown" not in caplog.text


def test_another_model_at_the_same_place_is_named(judge_dir, tmp_path, caplog):
    """As a resumed training goes on, what is unknown is a line."""
    judge = shutil.copytree(judge_dir, tmp_path / "judge")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"first")
    state = tmp_path / "checkpoint-3" / "trainer_state.json"
    state.parent.mkdir()
    state.touch()
    (state.parent / "optimizer.pt").touch()
    config = {"output_dir": str(tmp_path), "do_train": True}
    config |= {"model_name_or_path": str(judge), "adapter_name_or_path": f" {adapter},"}
    before = config | {MODEL: weights_of(config)}
    (adapter / "adapter_model.safetensors").write_bytes(b"other")
    for recorded, words in (
        (before, f"another {MODEL};"),
        (before | {MODEL: None}, "same model is unknown (its server does not say"),
        (config | {MODEL: weights_of(config)}, ""),
    ):
        (tmp_path / "train.yaml").write_text(yaml.safe_dump(recorded))
        caplog.clear()
        with_resume(config | {MODEL: weights_of(config)})
        warnings = [row.message for row in caplog.records if row.levelname == "WARNING"]
        assert words in caplog.text and bool(words) == bool(warnings)


def test_two_trainings_do_not_write_into_one_folder(judge_dir, data_dir, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump(train_config(judge_dir, data_dir, output)))
    with locked(output), pytest.raises(UserError, match=str(output)):
        run(str(file), [], {})


CHANGES = {
    "max_steps": 8,
    "save_strategy": "steps",
    "save_steps": 4,
    "overwrite_output_dir": False,
    "disable_shuffling": False,
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine",
    "lora_dropout": 0.1,
    "per_device_train_batch_size": 4,
    "first_token_weight": 0.1,
}


def train(judge_dir: Path, data_dir: Path, output: Path) -> None:
    """Eight steps that save every fourth one."""
    config = train_config(judge_dir, data_dir, output, **CHANGES)
    run_processes(["-m", "paco_reward.cli", "train"], [config], output.parent)


@pytest.fixture(scope="module")
def whole(judge_dir, data_dir, tmp_path_factory) -> Path:
    """An uninterrupted training."""
    folder = tmp_path_factory.mktemp("resume") / "whole"
    train(judge_dir, data_dir, folder)
    return folder


@pytest.mark.slow
def test_a_killed_training_resumes_to_the_same_adapter(whole, judge_dir, data_dir):
    """Weights, optimizer, schedule, data order and dropout are all restored."""
    killed = whole.with_name("killed")
    shutil.copytree(whole / "checkpoint-4", killed / "checkpoint-4")
    train(judge_dir, data_dir, killed)
    state = Path("checkpoint-4", "trainer_state.json")
    # The first four steps were not repeated.
    assert (killed / state).stat().st_mtime == (whole / state).stat().st_mtime
    assert losses(killed) == pytest.approx(losses(whole), abs=1e-6)
    weights = adapter(killed)
    for name, expected in adapter(whole).items():
        np.testing.assert_allclose(weights[name], expected, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_the_adapter_loads_as_the_published_model_card_does(whole, judge_dir, tiny, tmp_path):
    """Its calls give the same score as ours, from an adapter that matters."""
    content = []
    for number in range(2):
        image = tmp_path / f"{number}.png"
        tiny.picture(number, size=56).save(image)
        content.append({"type": "image", "image": str(image)})
    question = theme_question("a paper boat")
    content.append({"type": "text", "text": question})
    messages = [{"role": "user", "content": content}]
    base = Qwen2_5_VLForConditionalGeneration.from_pretrained(str(judge_dir))
    processor = AutoProcessor.from_pretrained(str(judge_dir))
    model = PeftModel.from_pretrained(base, str(whole))
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    images, videos = process_vision_info(messages)
    inputs = processor(text=[text], images=images, videos=videos, padding=True, return_tensors="pt")
    ids = processor.tokenizer.convert_tokens_to_ids(["Yes", "No"])
    with torch.no_grad():
        yes, no = torch.exp(model(**inputs).logits[0, -1, ids])

    pair = Pair(tiny.picture(0, size=56), tiny.picture(1, size=56), question)
    scorer = JudgeScorer.from_pretrained(judge_dir, whole)
    score = scorer.score([pair], top=None)[0].p_yes
    assert (yes / (yes + no)).item() == pytest.approx(score, abs=1e-5)
    with scorer.model.disable_adapter():
        assert abs(scorer.score([pair], top=None)[0].p_yes - score) > 0.02
