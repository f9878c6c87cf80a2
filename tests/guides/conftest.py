"""A terminal with the published models, all tiny, in its cache."""

import shutil
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(Path(__file__).parent),
    *(str(REPOSITORY / part / "tests") for part in ("PaCo-GRPO", "PaCo-Reward")),
]

import tiny_judge
from terminal import Terminal
from tiny_pipelines import save_clip, save_open_clip
from tiny_policies import build


@pytest.fixture(scope="session")
def published(tmp_path_factory) -> dict[str, Path]:
    """Published name → folder of tiny weights of the same class."""
    weights = tmp_path_factory.mktemp("weights")
    toy = REPOSITORY / "quickstart" / "models"
    clip = Path(save_clip(weights / "clip"))
    judge = tiny_judge.save_answering(tiny_judge.save_judge(weights / "random"), weights / "judge")
    return {
        "black-forest-labs/FLUX.1-dev": toy / "flux",
        "black-forest-labs/FLUX.1-Kontext-dev": toy / "flux_kontext",
        "Qwen/Qwen-Image-Edit": build("qwen_image_edit", weights / "qwen"),
        "Qwen/Qwen2.5-VL-7B-Instruct": judge,
        "X-GenGroup/PaCo-Reward-7B": judge,
        "X-GenGroup/Paco-Reward-7B": judge,
        "google/gemma-3-4b-it": judge,
        "openai/clip-vit-large-patch14": clip,
        "yuvalkirstain/PickScore_v1": clip,
        "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": clip,
    }


@pytest.fixture
def terminal(published, tmp_path, request):
    """Its environment ``vllm`` is the test's parameter; without it, transformers serve."""
    terminal = Terminal(tmp_path, getattr(request, "param", Path(sys.prefix)), published)
    yield terminal
    terminal.stop_servers()
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture(scope="session")
def open_clip(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("open_clip")
    save_open_clip(folder)
    return f"local-dir:{folder}"
