"""Small trainings in separate processes, and their outputs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import yaml
from safetensors.numpy import load_file

TIMEOUT = 590


def train_config(judge_dir, data_dir, output, **changes) -> dict:
    """Two steps of plain gradient descent, so that weights show gradients."""
    return {
        "model_name_or_path": str(judge_dir),
        "do_train": True,
        "lora_rank": 4,
        "lora_target": "q_proj,up_proj,attn.qkv",
        "freeze_vision_tower": False,
        "dataset_dir": str(data_dir),
        "dataset": "pairs",
        "template": "qwen2_vl",
        "cutoff_len": 512,
        "output_dir": str(output),
        "overwrite_output_dir": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "disable_shuffling": True,
        "disable_gradient_checkpointing": True,
        "per_device_train_batch_size": 8,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 1e9,
        "use_cpu": True,
        "overwrite_cache": True,
        **changes,
    }


def environment_of(folder: Path) -> dict[str, str]:
    """Of a training in one process, with its cache in a folder."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "LLAMAFACTORY_VERBOSITY": "WARN",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "NPROC_PER_NODE": "1",
    }


def run_processes(command: list[str], configs: list[dict], folder: Path) -> None:
    """Run trainings in a separate process."""
    command = [sys.executable, *command]
    for config in configs:
        file = folder / f"{Path(config['output_dir']).name}.yaml"
        file.write_text(yaml.safe_dump(config))
        command.append(str(file))
    options = {"env": environment_of(folder), "capture_output": True, "text": True}
    done = subprocess.run(command, timeout=TIMEOUT, check=False, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def adapter(folder: Path) -> dict[str, np.ndarray]:
    """The weights of a trained adapter."""
    return load_file(folder / "adapter_model.safetensors")


def losses(folder: Path) -> list[float]:
    state = json.loads((folder / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]
