"""A terminal with the published models, all tiny, in its cache."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from paco_judge.scorer import JudgeScorer

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


def save_judge(folder: Path, tiny_judge) -> Path:
    """A random judge that always answers Yes or No: the toy judge knows one question, the guides ask others."""
    tiny_judge.save_judge(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(["Yes", "No"])
    # Yes and No share what the last hidden state of every question has in common, so that both are always the most
    # probable; they differ a little, so that scores do. All other tokens have the logit 0.
    scorer, states = JudgeScorer(model.eval(), AutoProcessor.from_pretrained(folder)), []
    hook = model.lm_head.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0][:, -1]))
    noise = [Image.effect_noise((64, 64), sigma).convert("RGB") for sigma in (5, 100, 200)]
    scorer.score(scorer.image_pairs([*noise, Image.new("RGB", (64, 64), "red")], "one red fox"))
    hook.remove()
    common = torch.cat(states).mean(dim=0)
    old, new = model.get_input_embeddings().weight.detach(), torch.zeros_like(model.lm_head.weight)
    new[words] = 10 * common / common.square().sum() + old[words] / 10
    model.lm_head.weight = torch.nn.Parameter(new)
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def new_terminal(tmp_path_factory, tiny_judge):
    """Makes a terminal whose ``vllm`` environment is the given folder."""
    weights = tmp_path_factory.mktemp("weights")
    clip, judge = Path(save_clip(weights / "clip")), save_judge(weights / "judge", tiny_judge)
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
