"""Tiny weights of the real classes, and stand-ins for packages that are not installed here."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import fake_judge
from tiny_pipelines import save_clip, save_open_clip
from wired import MODELS, respond, share_of


@pytest.fixture
def judge():
    """It answers each question otherwise."""
    with fake_judge.FakeJudge(respond, models=MODELS) as server:
        yield server


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory):
    return save_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="session")
def tiny_open_clip(tmp_path_factory):
    """Name and file of weights of a tiny OpenCLIP."""
    return save_open_clip(tmp_path_factory.mktemp("open_clip"))


@pytest.fixture
def packages(monkeypatch):
    """What packages of rewards offer, with the arguments of each load."""
    loaded = []

    def preprocess(image):
        pixels = np.asarray(image.resize((4, 4)), dtype=np.float32)
        return torch.tensor(pixels).flatten()[None]

    def embed(pixels):
        return pixels - pixels.mean(dim=1, keepdim=True)

    def dreamsim(**arguments):
        loaded.append(arguments)
        return SimpleNamespace(embed=embed), preprocess

    def load(name, **arguments):
        loaded.append({"name": name} | arguments)
        model = SimpleNamespace(score=lambda prompt, image: share_of(prompt, image.tobytes()))
        model.eval = lambda: model
        return model

    class HPSv3RewardInferencer:
        def __init__(self, **arguments):
            loaded.append(arguments)

        def reward(self, image_paths, prompts):
            return torch.tensor([[share(*pair), 9.0] for pair in zip(prompts, image_paths)])

    class EditRewardInferencer(HPSv3RewardInferencer):
        def reward(self, prompts, image_src, image_paths):
            edits = zip(prompts, image_src, image_paths, strict=True)
            return torch.tensor([[share(*edit), 9.0] for edit in edits])

    def share(prompt, *images):
        is_noise = images[-1].size == (448, 448) and images[-1].getcolors(1000) is None
        return -1.0 if is_noise else share_of(prompt, *(image.tobytes() for image in images))

    prompts = {
        "_context_no_delimit_reasoning_first": "context",
        "_prompts_0shot_two_image_edit_rule": "rules",
        "_prompts_0shot_tie_rule_SC": "edit, 0 to 10: <instruction>",
        "_prompts_0shot_rule_PQ": "quality, 0 to 10",
    }
    parser = SimpleNamespace(parse_vlm_output_to_dict=json.loads)
    modules = {
        "dreamsim": SimpleNamespace(dreamsim=dreamsim),
        "ImageReward": SimpleNamespace(load=load),
        "hpsv3": SimpleNamespace(HPSv3RewardInferencer=HPSv3RewardInferencer),
        "EditReward": SimpleNamespace(EditRewardInferencer=EditRewardInferencer),
        "dlib": SimpleNamespace(),
        "face_recognition_models": SimpleNamespace(),
        "editscore": SimpleNamespace(vie_prompts=SimpleNamespace(**prompts), json_parser=parser),
        "editscore.json_parser": parser,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(loaded=loaded, embed=lambda image: embed(preprocess(image)))
