"""The published PaCo-GRPO guide, block by block: weights, servers, training."""

import io
import json
import shutil
from pathlib import Path

import httpx
import pyarrow.parquet
import pytest
from PIL import Image
from terminal import free_port

pytestmark = pytest.mark.slow

# What makes a run fit a laptop; the rest of each configuration is as published.
TOY_SIZE = [
    "--config.num_epochs=1",
    "--config.mixed_precision=no",
    "--config.save_dir=runs",
    "--config.sample.num_steps=6",
    "--config.sample.num_images_per_prompt=2",
    "--config.sample.unique_sample_num_per_epoch=2",
    "--config.train.resolution=64",
    "--config.test.num_steps=2",
    "--config.test.num_images=2",
    "--config.test.resolution=64",
]


def metrics(clone: Path) -> list[dict]:
    """The rows of the metrics file of the only run in ``clone``, which is deleted."""
    (folder,) = (clone / "PaCo-GRPO" / "runs").iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(folder)
    return rows


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("python paco_grpo/rewards/pickscore_scores.py", "in the cache"),
        # OpenCLIP's name stands for a size that no tiny weights have: here it is not in the cache, which is explained.
        ("python paco_grpo/rewards/subfig_clipT.py || true", "HF_ENDPOINT"),
        ("hf download X-GenGroup/PaCo-Reward-7B", "snapshots"),
        ("hf download X-GenGroup/Paco-Reward-7B", "snapshots"),
    ],
)
def test_weights_are_fetched_before_training(terminal, command, answer):
    assert answer in terminal.run(f"conda activate paco-grpo\n{command}", "PaCo-GRPO")


def save_editing_set(folder: Path) -> Path:
    """What ``python dataset/fetch.py sharegpt-4o-image`` downloads, in small."""
    folder.mkdir()
    for split in ("train", "test"):
        images = []
        for shade in (40, 120, 200):
            Image.new("RGB", (64, 64), (shade, 90, 60)).save(data := io.BytesIO(), "PNG")
            images.append(data.getvalue())
        columns = {"prompt": ["make the star blue", "make the star red", "make it green"], "image": images}
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{split}.parquet")
    return folder


def check_learning(rows: list[dict], reward: str) -> None:
    """The judge's scores have reached the weights."""
    before, trained, after = rows
    assert before["phase"] == after["phase"] == "eval" and trained[f"reward/{reward}_std"] > 0
    assert trained["reward/missing_share"] == 0 and trained["train/grad_norm"] > 0


ONE_MODEL = """
export CUDA_VISIBLE_DEVICES=0
export GPU_MEMORY_UTILIZATION=0.85
export VLLM_MODEL_PATHS='X-GenGroup/PaCo-Reward-7B'
export VLLM_MODEL_NAMES='Paco-Reward-7B'
conda activate vllm
bash vllm_server/launch.sh
"""
ONE_PORT = """
export VLLM_MODEL_PATHS="X-GenGroup/PaCo-Reward-7B,google/gemma-3-4b-it"
export VLLM_MODEL_NAMES="Paco-Reward-7B,Gemma-3-4B-IT"
export VLLM_PORT=8000
export VLLM_LABEL='multi_server'
bash vllm_server/launch.sh
"""
TWO_PORTS = (
    """
export VLLM_MODEL_PATHS="X-GenGroup/PaCo-Reward-7B"
export VLLM_MODEL_NAMES="Paco-Reward-7B"
export VLLM_PORT=8000
export VLLM_LABEL='paco-reward'
bash vllm_server/launch.sh
""",
    """
export VLLM_MODEL_PATHS="google/gemma-3-4b-it"
export VLLM_MODEL_NAMES="Gemma-3-4B-IT"
export VLLM_PORT=8001
export VLLM_LABEL='gemma'
bash vllm_server/launch.sh
""",
)


def test_servers(terminal):
    """One model, and both options of the guide for two: one port for both, and a port for each."""
    activated = "conda activate vllm\n"
    ports = {port: str(free_port()) for port in ("8000", "8001")}
    alone, shared = str(free_port()), str(free_port())
    assert "Ready:  Paco-Reward-7B" in terminal.run(ONE_MODEL, "PaCo-GRPO", VLLM_PORT=alone)
    terminal.run(activated + ONE_PORT.replace("8000", shared), "PaCo-GRPO")
    for block in TWO_PORTS:
        for published, free in ports.items():
            block = block.replace(published, free)
        terminal.run(activated + block, "PaCo-GRPO")
    served = {
        port: httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"] for port in (shared, *ports.values())
    }
    names = [sorted(model["id"] for model in models) for models in served.values()]
    assert names == [["Gemma-3-4B-IT", "Paco-Reward-7B"], ["Paco-Reward-7B"], ["Gemma-3-4B-IT"]]
