"""A terminal for people who follow the published guides: a copy of the repository, without a GPU.

``conda``, ``pip`` and ``git clone`` are stand-ins. Nothing is downloaded: the published models are
in the hub's cache, as tiny weights of the same classes.
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pyarrow.parquet
from PIL import Image

REPOSITORY = Path(__file__).resolve().parents[2]
REVISION = "0" * 40
# The rest of each configuration is as published.
TOY_SIZE = {
    "num_epochs": 1,
    "mixed_precision": "no",
    "sample.num_steps": 6,
    "sample.num_images_per_prompt": 2,
    "sample.unique_sample_num_per_epoch": 2,
    "train.resolution": 64,
    "test.num_steps": 2,
    "test.num_images": 2,
    "test.resolution": 64,
}
TOY_JUDGE = {
    "max_steps": 1,
    "global_batch_size": 8,
    "cutoff_len": 512,
    "image_max_pixels": 4096,
    "bf16": False,
    "preprocessing_num_workers": 1,
    "dataloader_num_workers": 0,
    "lora_rank": 4,
    "plot_loss": False,
}
# The judge's.
DATA_SETS = ("consistency_reward_cot_train", "sharegpt_editing_cot", "consistency_reward_cot_test")
STAND_INS = r"""
set -eo pipefail
clean_path="$PATH"
conda() {
  case "$1" in
    create) test -d "$ENVIRONMENTS/$3" ;;
    activate)
      export CONDA_DEFAULT_ENV="$2" CONDA_PREFIX="$ENVIRONMENTS/$2"
      export PATH="$CONDA_PREFIX/bin:$clean_path" ;;
  esac
}
pip() { echo "pip $*" >>"$HOME/pip.log"; }
git() { cp -r "$CLONE" PaCo-RL; }
"""


class Terminal:
    """Runs blocks of a guide, each in its own bash; ``clone`` is the copy of the repository."""

    def __init__(self, home: Path, vllm_environment: Path, published: Mapping[str, Path]) -> None:
        self.clone = home / "PaCo-RL"
        self.clone.mkdir()
        files = "git ls-files -z --cached --others --exclude-standard"
        copy = f"{files} | xargs -0 cp --parents -t {self.clone}"
        subprocess.run(["bash", "-c", copy], cwd=REPOSITORY, check=True)
        environments = home / "environments"
        environments.mkdir()
        for name in ("paco-grpo", "paco-reward"):
            (environments / name).symlink_to(sys.prefix)
        (environments / "vllm").symlink_to(vllm_environment)
        for name, model in published.items():
            entry = home / "hub" / f"models--{name.replace('/', '--')}"
            (entry / "refs").mkdir(parents=True)
            (entry / "refs" / "main").write_text(REVISION)
            shutil.copytree(model, entry / "snapshots" / REVISION)
        kept = ("PATH", "PYTHONPATH", "LANG", "TMPDIR")
        self.environment = {name: os.environ[name] for name in kept if name in os.environ} | {
            "HOME": str(home),
            "CLONE": str(self.clone),
            "ENVIRONMENTS": str(environments),
            "PACO_RUNTIME_DIR": str(home / "run"),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def run(self, block: str, folder: str | Path = ".", **variables) -> str:
        """The output of a block that is run in ``folder`` of the clone."""
        block = re.sub(r"CUDA_VISIBLE_DEVICES=\S+", "CUDA_VISIBLE_DEVICES=", block)
        environment = self.environment | {name: str(value) for name, value in variables.items()}
        done = subprocess.run(
            ["bash", "-c", STAND_INS + block],
            cwd=self.clone / folder,
            env=environment,
            start_new_session=True,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1800,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def stop_servers(self) -> None:
        stop = "conda activate paco-grpo\nbash vllm_server/stop.sh"
        for state in Path(self.environment["PACO_RUNTIME_DIR"]).glob("*/state.json"):
            self.run(stop, "PaCo-GRPO", VLLM_LABEL=state.parent.name)


def check_learning(run: Path, reward: str) -> None:
    """The judge's scores have reached the weights."""
    before, trained, after = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert before["phase"] == after["phase"] == "eval"
    assert trained["reward/missing_share"] == 0
    assert trained[f"reward/{reward}_std"] > 0
    assert trained["train/grad_norm"] > 0


def save_editing_set(folder: Path) -> None:
    """What ``dataset/fetch.py sharegpt-4o-image`` downloads, in small."""
    folder.mkdir()
    images = []
    for shade in (40, 120, 200):
        data = io.BytesIO()
        Image.new("RGB", (64, 64), (shade, 90, 60)).save(data, "PNG")
        images.append(data.getvalue())
    prompts = ["make the star blue", "make the star red", "make it green"]
    table = pyarrow.table({"prompt": prompts, "image": images})
    pyarrow.parquet.write_table(table, folder / "train.parquet")
    pyarrow.parquet.write_table(table, folder / "test.parquet")
