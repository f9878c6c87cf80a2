"""Small trainings in separate processes, and their outputs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import yaml
from safetensors.torch import load_file

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


def run_processes(command, configs, folder) -> str:
    """Run trainings in a separate process; returns its output."""
    files = []
    for config in configs:
        files.append(Path(folder) / f"{Path(config['output_dir']).name}.yaml")
        files[-1].write_text(yaml.safe_dump(config))
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "LLAMAFACTORY_VERBOSITY": "WARN",
        "HF_HUB_OFFLINE": "1",
    }
    environment |= {"HF_DATASETS_CACHE": str(Path(folder) / "cache"), "NPROC_PER_NODE": "1"}
    command = [sys.executable, *command, *map(str, files)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def adapter(folder) -> dict[str, np.ndarray]:
    return {
        name: tensor.numpy()
        for name, tensor in load_file(Path(folder) / "adapter_model.safetensors").items()
    }


def losses(folder) -> list[float]:
    state = json.loads((Path(folder) / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]
