import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # vllm_server is run from its folder, not installed
sys.path[:0] = [str(Path(__file__).parent), str(ROOT.parent / "PaCo-Reward" / "tests")]
import tiny_judge
from serving_tools import Shell

from paco_judge.client import Pair
from paco_judge.questions import theme_question
from paco_judge.scorer import JudgeScorer
from vllm_server.servers import all_servers, end_servers

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pairs() -> list[Pair]:
    """Questions whose images, sizes and prompts all differ."""
    pairs = []
    for index in range(16):
        first = tiny_judge.picture(index, 28 + 9 * (index % 7))
        second = tiny_judge.picture(50 + index, 30 + 11 * (index % 5))
        theme = f"{index} foxes" + " and a boat" * (index % 3)
        pairs.append(Pair(first, second, theme_question(theme)))
    return pairs


@pytest.fixture(scope="session")
def judge_folder(tmp_path_factory) -> Path:
    """A random judge whose Yes and No are always among the top 20."""
    folder = tmp_path_factory.mktemp("judge")
    return tiny_judge.save_answering(tiny_judge.save_judge(folder / "random"), folder / "judge", 5)


@pytest.fixture(scope="session")
def scorer(judge_folder):
    return JudgeScorer.from_pretrained(judge_folder)


@pytest.fixture(scope="session")
def scores(scorer, pairs) -> np.ndarray:
    """P(Yes) of ``pairs``, all different."""
    scores = np.array([verdict.p_yes for verdict in scorer.score(pairs)])
    assert np.diff(np.sort(scores)).min() > 2e-5
    assert np.ptp(scores) > 1e-2
    return scores


@pytest.fixture
def model(tmp_path) -> Path:
    """A folder that looks like a model."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = '{"model_type": "qwen2_5_vl", "text_config": {"max_position_embeddings": 2048}}'
    (folder / "config.json").write_text(config)
    return folder


@pytest.fixture
def two(model) -> dict:
    """Variables of a launch with two models."""
    shutil.copytree(model, model.parent / "second")
    return {"VLLM_MODEL_PATHS": "model,second", "VLLM_MODEL_NAMES": "Judge,Other"}


@pytest.fixture
def shell(tmp_path, model):
    shell = Shell(tmp_path)
    yield shell
    for label, servers in all_servers(shell.folder.parent).items():
        end_servers(shell.folder.parent / label, servers, 1.0)
