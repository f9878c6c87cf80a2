"""A repeated training resumes; a killed one leaves no process; its adapter loads as on the card."""

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import yaml
from training_tools import adapter, losses, run_processes, train_config

from paco_judge.errors import UserError
from paco_judge.images import load_image
from paco_judge.questions import Pair, theme_question
from paco_judge.scorer import JudgeScorer
from paco_reward.launch import run, with_resume


@pytest.fixture
def resumable(tmp_path, caplog):
    """A configuration whose output folder has two checkpoints."""
    caplog.set_level(logging.INFO, "paco_reward")
    for step in (9, 10):
        checkpoint = tmp_path / f"checkpoint-{step}"
        checkpoint.mkdir()
        state = {"global_step": step, "max_steps": 20}
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
        (checkpoint / "optimizer.pt").touch()
    return {"output_dir": str(tmp_path), "do_train": True, "learning_rate": 1e-4}


def test_a_new_folder_is_not_resumed(tmp_path, caplog):
    config = {"output_dir": str(tmp_path / "new"), "do_train": True}
    assert with_resume(config) == config and not caplog.messages


def test_the_last_checkpoint_is_resumed_and_differences_are_listed(resumable, caplog):
    folder = Path(resumable["output_dir"])
    before = resumable | {"dataset": "a", "resume_from_checkpoint": "earlier"}
    (folder / "train.yaml").write_text(yaml.safe_dump(before, sort_keys=False))
    changed = resumable | {"learning_rate": 2e-4, "lora_rank": 8}
    expected = changed | {"resume_from_checkpoint": str(folder / "checkpoint-10")}
    assert with_resume(changed) == expected
    resumed, *differences = caplog.messages
    assert "checkpoint-10" in resumed and "step 10 of 20" in resumed
    assert [difference.partition(": ")[2] for difference in differences] == [
        "learning_rate 0.0002, before 0.0001",
        "dataset None, before 'a'",
        "lora_rank 8, before None",
    ]


def test_a_checkpoint_that_was_cut_off_is_not_resumed(resumable, caplog):
    folder = Path(resumable["output_dir"])
    (folder / "checkpoint-10" / "trainer_state.json").unlink()
    (folder / "checkpoint-9" / "optimizer.pt").unlink()
    assert with_resume(resumable)["resume_from_checkpoint"] == str(folder / "checkpoint-9")
    assert "checkpoint-10 is incomplete" in caplog.text and "no optimizer state" in caplog.text
    (folder / "checkpoint-9" / "trainer_state.json").unlink()
    assert with_resume(resumable) == resumable | {"overwrite_output_dir": True}


def test_what_the_user_chose_is_kept(resumable, caplog):
    for choice in ({"overwrite_output_dir": True}, {"resume_from_checkpoint": "mine"}):
        assert with_resume(resumable | choice) == resumable | choice
    assert not caplog.messages


def test_finished_weights_are_not_overwritten(tmp_path):
    (tmp_path / "adapter_model.safetensors").touch()
    config = {"output_dir": str(tmp_path), "do_train": True}
    with pytest.raises(UserError, match="overwrite_output_dir"):
        with_resume(config)
    assert with_resume(config | {"overwrite_output_dir": True})


def start(config: dict, file: Path, processes: int, *overrides: str) -> psutil.Popen:
    """``paco-reward train`` in its own session."""
    file.write_text(yaml.safe_dump(config))
    environment = os.environ | {
        "NPROC_PER_NODE": str(processes),
        "OMP_NUM_THREADS": "1",
        "LLAMAFACTORY_VERBOSITY": "WARN",
        "HF_DATASETS_CACHE": str(file.with_suffix("")),
    }
    command = [sys.executable, "-m", "paco_reward.cli", "train", str(file), *overrides]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return psutil.Popen(command, env=environment, start_new_session=True, **options)


def wait_for(condition, process: psutil.Popen) -> None:
    while not condition():
        assert process.poll() is None, process.stdout.read()[-3000:]
        time.sleep(0.1)


@pytest.mark.slow
def test_a_killed_training_leaves_no_process_and_is_resumed(judge_dir, data_dir, tmp_path):
    """kill -9 of the command alone, amid two processes; then again with other options."""
    changes = {"max_steps": 4000, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    changes |= {"overwrite_output_dir": False, "per_device_train_batch_size": 2}
    changes |= {"first_token_weight": 0.1, "learning_rate": 1e-4}
    output = tmp_path / "out"
    config = train_config(judge_dir, data_dir, output, **changes)
    training = start(config, tmp_path / "a.yaml", 2)
    wait_for(lambda: list(output.glob("checkpoint-*/trainer_state.json")), training)
    with pytest.raises(UserError, match=str(output)):
        run(str(tmp_path / "a.yaml"), [], {})
    descendants = training.children(recursive=True)
    assert len(descendants) >= 2
    training.kill()
    _, alive = psutil.wait_procs([training, *descendants], timeout=20)
    assert not alive

    (output / "checkpoint-99999").mkdir()  # as if the kill had come while one was written
    saved = max(int(file.name[11:]) for file in output.glob("checkpoint-*[0-8]"))
    more = ["learning_rate=2e-4", f"max_steps={saved + 2}"]
    resumed = start(config, tmp_path / "a.yaml", 2, *more)
    said, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, said[-3000:]
    assert "resuming from" in said and "checkpoint-99999 is incomplete" in said
    assert "learning_rate 0.0002, before 0.0001" in said and f"saved in {output}" in said
    state = json.loads((output / "trainer_state.json").read_text())
    assert state["global_step"] == saved + 2 and adapter(output)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_helpers_of_tokenization_end_with_a_killed_training(
    processes, judge_dir, data_dir, tmp_path
):
    """They are forked by `datasets`, and would keep their memory for ever."""
    data = Path(shutil.copytree(data_dir, tmp_path / "data"))
    rows = json.loads((data / "pairs.json").read_text())
    (data / "pairs.json").write_text(json.dumps(rows * 300))  # seconds of tokenization
    config = train_config(judge_dir, data, tmp_path / "out", preprocessing_num_workers=3)
    training = start(config, tmp_path / "a.yaml", processes)
    workers = processes if processes > 1 else 0
    wait_for(lambda: len(training.children(recursive=True)) >= workers + 3, training)
    descendants = training.children(recursive=True)
    training.kill()
    _, alive = psutil.wait_procs([training, *descendants], timeout=20)
    assert not alive


def train(judge_dir: Path, data_dir: Path, output: Path) -> None:
    """Eight steps that save every fourth one."""
    config = train_config(
        judge_dir,
        data_dir,
        output,
        max_steps=8,
        save_strategy="steps",
        save_steps=4,
        overwrite_output_dir=False,
        disable_shuffling=False,
        optim="adamw_torch",
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        lora_dropout=0.1,
        per_device_train_batch_size=4,
        first_token_weight=0.1,
    )
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
    from peft import PeftModel
    from qwen_vl_utils import process_vision_info
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    files = [tmp_path / "image_1.png", tmp_path / "image_2.png"]
    for number, file in enumerate(files):
        tiny.picture(number, size=56).save(file)
    question = theme_question("a paper boat")
    base = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        str(judge_dir), torch_dtype=torch.bfloat16
    )
    processor = AutoProcessor.from_pretrained(str(judge_dir))
    model = PeftModel.from_pretrained(base, str(whole))
    content = [{"type": "image", "image": str(file)} for file in files]
    content.append({"type": "text", "text": question})
    messages = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    images, videos = process_vision_info(messages)
    inputs = processor(text=[text], images=images, videos=videos, padding=True, return_tensors="pt")
    ids = [processor.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("Yes", "No")]
    with torch.no_grad():
        yes, no = torch.exp(model(**inputs).logits[0, -1, ids])

    def ours(*judge: Path) -> float:
        scorer = JudgeScorer.from_pretrained(*judge, dtype=torch.bfloat16)
        (verdict,) = scorer.score([Pair(*map(load_image, files), question)])
        return verdict.p_yes

    assert (yes / (yes + no)).item() == pytest.approx(ours(judge_dir, whole), abs=5e-3)  # bfloat16
    assert abs(ours(judge_dir, whole) - ours(judge_dir)) > 0.02
