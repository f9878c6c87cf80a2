"""A killed training resumes from its last checkpoint; its outputs can be viewed and loaded."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from training_tools import TIMEOUT, adapter, losses, train_config

from paco_judge.questions import theme_question
from paco_judge.scorer import JudgeScorer

STEPS = 8


def start(config: dict, folder: Path, log: Path) -> subprocess.Popen:
    """`paco-reward train` as a user starts it, in one process."""
    file = folder / f"{Path(config['output_dir']).name}.yaml"
    file.write_text(yaml.safe_dump(config))
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "NPROC_PER_NODE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
    }
    command = [sys.executable, "-m", "paco_reward.cli", "train", str(file)]
    return subprocess.Popen(command, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen, log: Path) -> str:
    assert process.wait(timeout=TIMEOUT) == 0, log.read_text()[-4000:]
    return log.read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def whole(judge_dir, data_dir, folder) -> Path:
    """An uninterrupted training."""
    config = settings(judge_dir, data_dir, folder / "whole")
    finish(start(config, folder, folder / "whole.log"), folder / "whole.log")
    return folder / "whole"


def settings(judge_dir: Path, data_dir: Path, output: Path) -> dict:
    changes = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 2, "overwrite_output_dir": False}
    changes |= {"disable_shuffling": False, "optim": "adamw_torch", "learning_rate": 1e-2, "lora_dropout": 0.1}
    changes |= {"lr_scheduler_type": "cosine", "per_device_train_batch_size": 4, "first_token_weight": 0.1}
    return train_config(judge_dir, data_dir, output, **changes)


@pytest.mark.slow
def test_a_killed_training_resumes_to_the_same_adapter(whole, judge_dir, data_dir, folder):
    """Weights, optimizer, schedule, data order and dropout are all restored."""
    config, log = settings(judge_dir, data_dir, folder / "killed"), folder / "killed.log"
    process = start(config, folder, log)
    deadline = time.monotonic() + TIMEOUT
    while not (folder / "killed" / "checkpoint-2" / "trainer_state.json").exists():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (folder / "killed" / "adapter_model.safetensors").exists()
    text = finish(start(config, folder, log), log)
    assert "Continuing training from checkpoint" in text or "resum" in text.lower()
    assert losses(folder / "killed") == pytest.approx(losses(whole), abs=1e-6)
    expected, found = adapter(whole), adapter(folder / "killed")
    for name, weights in expected.items():
        np.testing.assert_allclose(found[name], weights, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_the_adapter_loads_as_the_published_model_card_does(whole, judge_dir, tiny, tmp_path):
    """Its calls, with folders and files for hub names and URLs: the same score as ours, from an adapter that matters."""
    from peft import PeftModel
    from qwen_vl_utils import process_vision_info
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    files = [tmp_path / "image_1.png", tmp_path / "image_2.png"]
    for number, file in enumerate(files):
        tiny.picture(number, size=56).save(file)
    base_model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        str(judge_dir), torch_dtype=torch.bfloat16, device_map="auto"
    )
    processor = AutoProcessor.from_pretrained(str(judge_dir))
    model = PeftModel.from_pretrained(base_model, str(whole))
    content = [{"type": "image", "image": str(file)} for file in files]
    content.append({"type": "text", "text": theme_question("a paper boat")})
    messages = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    image_inputs, video_inputs = process_vision_info(messages)
    inputs = processor(text=[text], images=image_inputs, videos=video_inputs, padding=True, return_tensors="pt")
    inputs = inputs.to("cuda" if torch.cuda.is_available() else "cpu")

    def score() -> float:
        with torch.no_grad():
            first_token_logits = model(**inputs).logits[0, -1, :]
        ids = [processor.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("Yes", "No")]
        yes, no = torch.exp(first_token_logits[ids])
        return (yes / (yes + no)).item()

    def ours(*judge: Path) -> float:
        scorer = JudgeScorer.from_pretrained(*judge, dtype=torch.bfloat16)
        return scorer.score(scorer.image_pairs(files, "a paper boat"))[0].p_yes

    assert score() == pytest.approx(ours(judge_dir, whole), abs=5e-3)  # bfloat16
    with model.disable_adapter():
        assert score() == pytest.approx(ours(judge_dir), abs=5e-3)
    assert abs(ours(judge_dir, whole) - ours(judge_dir)) > 0.02
    generated_ids = model.generate(**inputs, max_new_tokens=4)
    trimmed = [out_ids[len(in_ids) :] for in_ids, out_ids in zip(inputs.input_ids, generated_ids)]
    (answer,) = processor.batch_decode(trimmed, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(answer, str)
