"""A terminal with the published models, all tiny, in its cache."""

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2] / "PaCo-GRPO" / "tests")]

from terminal import REPOSITORY, Terminal
from tiny_pipelines import save_clip, save_open_clip
from tiny_policies import build

TOY = REPOSITORY / "quickstart" / "models"
PUBLISHED = {
    "black-forest-labs/FLUX.1-dev": TOY / "flux",
    "black-forest-labs/FLUX.1-Kontext-dev": TOY / "flux_kontext",
}
JUDGES = (
    "Qwen/Qwen2.5-VL-7B-Instruct",
    "X-GenGroup/PaCo-Reward-7B",
    "X-GenGroup/Paco-Reward-7B",
    "google/gemma-3-4b-it",
)


def load(name: str, file: str):
    """A module of PaCo-Reward's tests, registered by name."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "PaCo-Reward" / file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_judge():
    """The module that makes random judges and pairs."""
    return load("tiny_judge", "tests/tiny_judge.py")


@pytest.fixture(scope="session")
def pairing_tools():
    """The module with a model that judges by color."""
    load("paco_reward_fake_judge", "judge/tests/fake_judge.py")
    return load("pairing_tools", "tests/pairing_tools.py")


@pytest.fixture(scope="session")
def new_terminal(tmp_path_factory, tiny_judge):
    """Makes a terminal whose ``vllm`` environment is the given folder."""
    weights = tmp_path_factory.mktemp("weights")
    clip = Path(save_clip(weights / "clip"))
    judge = tiny_judge.save_answering(tiny_judge.save_judge(weights / "random"), weights / "judge")
    published = PUBLISHED | dict.fromkeys(JUDGES, judge)
    published["Qwen/Qwen-Image-Edit"] = build("qwen_image_edit", weights / "qwen")
    published |= dict.fromkeys(("yuvalkirstain/PickScore_v1", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"), clip)

    def make(vllm_environment: Path) -> Terminal:
        terminal = Terminal(tmp_path_factory.mktemp("home"), vllm_environment)
        for name, folder in published.items():
            terminal.publish(name, folder)
        return terminal

    return make


@pytest.fixture(scope="module")
def terminal(new_terminal):
    """A terminal whose ``vllm`` environment has no vLLM: the transformers engine serves, and the launcher says so."""
    terminal = new_terminal(Path(sys.prefix))
    yield terminal
    terminal.stop_servers()


@pytest.fixture(scope="session")
def open_clip(tmp_path_factory) -> str:
    """Name of a tiny OpenCLIP."""
    folder = tmp_path_factory.mktemp("open_clip")
    save_open_clip(folder)
    return f"local-dir:{folder}"
