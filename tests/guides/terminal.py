"""A terminal for people who follow the published guides: a copy of the repository, and no downloads.

``conda``, ``pip`` and ``git clone`` are stand-ins (tests of installing run the real ones); ``hf`` is the real command,
without a network. Published models are in the hub's cache under their names, as tiny weights of the same classes. There
is no GPU: lines that select some select none. Everything else is the real thing.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
REVISION = "0" * 40

STAND_INS = r"""
set -eo pipefail
clean_path="$PATH"
conda() {
  case "$1" in
    create) test -d "$ENVIRONMENTS/$3" ;;
    activate) export CONDA_DEFAULT_ENV="$2" CONDA_PREFIX="$ENVIRONMENTS/$2" PATH="$ENVIRONMENTS/$2/bin:$clean_path" ;;
    *) echo "conda $1 is not in the guides" >&2; return 1 ;;
  esac
}
pip() { echo "pip $*" >>"$HOME/pip.log"; }
git() {
  test "$1" = clone
  cp -r "$CLONE" PaCo-RL
}
"""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Terminal:
    """Runs blocks of a guide with bash, one shell for each call; ``clone`` is the copy of the repository."""

    def __init__(self, folder: Path, vllm_environment: Path) -> None:
        self.clone, self.hub, environments = folder / "PaCo-RL", folder / "hub", folder / "environments"
        copy_repository(self.clone)
        environments.mkdir()
        for name in ("paco-grpo", "paco-reward"):
            (environments / name).symlink_to(sys.prefix)
        (environments / "vllm").symlink_to(vllm_environment)
        keep = ("PATH", "PYTHONPATH", "LANG", "TMPDIR")
        self.environment = {name: os.environ[name] for name in keep if name in os.environ} | {
            "HOME": str(folder),
            "CLONE": str(self.clone),
            "ENVIRONMENTS": str(environments),
            "HF_HUB_CACHE": str(self.hub),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PACO_RUNTIME_DIR": str(folder / "run"),
        }

    def publish(self, name: str, model: Path) -> None:
        """Put a folder of weights into the hub's cache under a published name."""
        entry = self.hub / f"models--{name.replace('/', '--')}"
        (entry / "refs").mkdir(parents=True)
        (entry / "refs" / "main").write_text(REVISION)
        shutil.copytree(model, entry / "snapshots" / REVISION)

    def start(self, block: str, folder: str | Path = ".", **variables) -> subprocess.Popen:
        """Start a block in ``folder`` of the clone."""
        environment = self.environment | {name: str(value) for name, value in variables.items()}
        return subprocess.Popen(
            ["bash", "-c", STAND_INS + without_gpus(block)], cwd=self.clone / folder, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, block: str, folder: str | Path = ".", **variables) -> str:
        """Run a block to its end; returns what it printed. A failure fails the test."""
        process = self.start(block, folder, **variables)
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
        return output

    def stop_servers(self) -> None:
        """Stop every server that was launched."""
        for state in Path(self.environment["PACO_RUNTIME_DIR"]).glob("*/state.json"):
            self.run("conda activate paco-grpo\nbash vllm_server/stop.sh", "PaCo-GRPO", VLLM_LABEL=state.parent.name)


def without_gpus(block: str) -> str:
    """The block on a machine without GPUs."""
    return re.sub(r"CUDA_VISIBLE_DEVICES=\S+", "CUDA_VISIBLE_DEVICES=", block)


def copy_repository(target: Path) -> None:
    """The tracked and new files of the repository, as ``git clone`` gives them."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (REPOSITORY / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target / name)
