"""A killed training resumes from its last checkpoint; its adapter loads as the model card says."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from training_tools import adapter, losses, run_processes, train_config

from paco_judge.images import load_image
from paco_judge.questions import Pair, theme_question
from paco_judge.scorer import JudgeScorer


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
