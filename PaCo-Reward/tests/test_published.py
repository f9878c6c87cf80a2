"""The published training file is used as it is; ours has its global batch on any processes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from training_tools import TIMEOUT, adapter, environment_of

from paco_reward.config import load_config, with_accumulation

ROOT = Path(__file__).parent.parent
PUBLISHED = """
model_name_or_path: Qwen/Qwen2.5-VL-7B-Instruct
image_max_pixels: 2097152
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 32
lora_target: all
dataset_dir: PaCo-Dataset
dataset: consistency_reward_cot_train, sharegpt_editing_cot
eval_dataset: consistency_reward_cot_test
template: qwen2_vl
cutoff_len: 16384
max_samples: 100000
overwrite_cache: true
preprocessing_num_workers: 32
dataloader_num_workers: 32
first_token_weight: 0.1
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
learning_rate: 2.0e-4
num_train_epochs: 2.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
val_size: 0
per_device_eval_batch_size: 8
eval_strategy: epoch
compute_accuracy: true
first_token_accuracy: true
do_sample: true
temperature: 0.7
top_p: 0.9
max_new_tokens: 1024
output_dir: ./checkpoints/paco-reward-7b_lora_sft
logging_steps: 10
save_strategy: epoch
save_total_limit: null
plot_loss: true
overwrite_output_dir: true
save_only_model: true
report_to: none
run_name: PaCo-Reward-Qwen2.5-SFT-LoRA-CoT
project: PaCo-Reward
"""
GENERATION = {"do_sample", "temperature", "top_p", "max_new_tokens"}  # without effect on training
DIFFERENT = {
    "trust_remote_code",
    "gradient_accumulation_steps",
    "save_strategy",
    "save_total_limit",
    "save_only_model",
}
DIFFERENT |= {"overwrite_output_dir"}


@pytest.mark.slow
def test_the_published_file_trains(judge_dir, data_dir, tiny, tmp_path):
    """Two epochs of one step each; only model, paths and numbers of workers differ."""
    tiny.save_pairs(data_dir, 8, "edits", seed=900)
    file = tmp_path / "paco_reward_lora.yaml"
    output = tmp_path / "out"
    file.write_text(PUBLISHED)
    options = {
        "model_name_or_path": judge_dir,
        "dataset_dir": data_dir,
        "dataset": "pairs, edits",
        "eval_dataset": "held_out",
        "output_dir": output,
        "use_cpu": "true",
        "preprocessing_num_workers": 2,
        "dataloader_num_workers": 2,
    }
    command = ["bash", "train/paco_reward.sh", str(file)]
    command += [f"{name}={value}" for name, value in options.items()]
    environment = environment_of(tmp_path) | {"PYTHON": sys.executable}
    options = {"env": environment, "cwd": ROOT, "capture_output": True, "text": True}
    done = subprocess.run(command, timeout=TIMEOUT, check=False, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads((output / "trainer_state.json").read_text())["global_step"] == 2
    evaluation = json.loads((output / "eval_results.json").read_text())
    assert 0 <= evaluation["eval_first_token_accuracy"] <= 1
    assert not list((output / "checkpoint-2").glob("optimizer*"))
    for name, weights in adapter(output / "checkpoint-2").items():
        assert min(weights.shape) == 32, name  # lora_rank


def test_our_file_differs_from_the_published_one_in_what_its_comments_say():
    published = yaml.safe_load(PUBLISHED)
    ours = load_config(ROOT / "config/paco_reward_lora.yaml")
    assert with_accumulation(ours, 2)["gradient_accumulation_steps"] == 4  # as published
    ours |= {"resume_from_checkpoint": None, "val_size": 0}  # defaults
    changed = {key for key, value in published.items() if ours.get(key) != value}
    assert changed == DIFFERENT | GENERATION


@given(st.integers(1, 300), st.integers(1, 70), st.integers(1, 20))
def test_accumulation_gives_the_nearest_global_batch(wanted, processes, batch):
    config = {"global_batch_size": wanted, "per_device_train_batch_size": batch}
    steps = with_accumulation(config, processes).pop("gradient_accumulation_steps")
    possible = np.arange(1, wanted + 2) * processes * batch
    assert steps * processes * batch == possible[np.abs(possible - wanted).argmin()]


def test_an_explicit_accumulation_is_obeyed():
    config = {"global_batch_size": 64, "gradient_accumulation_steps": 3}
    assert with_accumulation(config, 2) == {"gradient_accumulation_steps": 3}
