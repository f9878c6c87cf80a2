"""Rewards that load a model, the commands and the benchmarks on a pretended GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_file
from starlette.testclient import TestClient
from tiny_pipelines import save_clip, save_open_clip
from tiny_run import ROOT, as_arguments, load_script, overrides_for

from paco_grpo.rewards.registry import CheckedReward
from paco_grpo.rewards.remote import service
from paco_grpo.rewards.remote.wire import decode_scores, encode_request
from paco_grpo.types import Item

GPU = str(ROOT.parent / "tests" / "pretend_cuda.py")
PROMPT = '1x2 grid of a cat that says "HI". [LEFT]: asleep. [RIGHT]: awake.'


def pictures() -> list[Image.Image]:
    font = ImageFont.load_default(40)
    images = []
    for color in ("black", "navy"):
        image = Image.new("RGB", (256, 128), "white")
        ImageDraw.Draw(image).text((90, 40), "HI", color, font)
        images.append(image)
    return images


@pytest.mark.slow
@pytest.mark.parametrize("name", ["subfig_clipT", "subfig_clipI", "pickscore", "clipscore", "ocr"])
def test_scores_are_those_of_the_cpu(tmp_path, on, name):
    if name.startswith("subfig"):
        model, weights = save_open_clip(tmp_path / "clip")
        arguments = {"model": model, "pretrained": weights}
    elif name == "ocr":
        arguments = {"threads": 1}
    else:
        clip = save_clip(tmp_path / "clip")
        arguments = {"model": clip} | ({"processor": clip} if name == "pickscore" else {})
    images = pictures()
    items = [Item(0, PROMPT), Item(1, PROMPT)]
    scores = {}
    for device in ("cpu", "cuda"):
        with on(device):
            reward = CheckedReward(name, arguments, torch.device(device))
            scores[device] = reward(images, items)
    assert np.isfinite(scores["cpu"]).all()
    np.testing.assert_allclose(scores["cuda"], scores["cpu"], rtol=1e-6)


@pytest.mark.slow
def test_a_service_scores_as_on_the_cpu(tmp_path, on, monkeypatch):
    services = []
    monkeypatch.setattr("uvicorn.run", lambda app, **_: services.append(app))
    options = ["--reward", "clipscore", "--kwargs", json.dumps({"model": save_clip(tmp_path)})]
    body = encode_request(pictures(), [Item(0, PROMPT), Item(1, PROMPT)])
    scores = {}
    for device in ("cpu", "cuda"):
        with on(device):
            assert service.main([*options, "--device", device]) == 0
            answer = TestClient(services[-1]).post("/score", content=body)
        scores[device] = decode_scores(answer.content, 2)
    np.testing.assert_allclose(scores["cuda"], scores["cpu"], rtol=1e-6)


def arguments(flux: Path, folder: Path, **changes: str) -> list[str]:
    overrides = overrides_for(flux, folder, **changes)
    return ["--config", f"{ROOT}/config/grpo.py:toy_t2is", *as_arguments(overrides)]


@pytest.mark.slow
def test_generated_images_are_those_of_the_cpu(tiny_flux_dir, tmp_path, on):
    pixels = {}
    for device in ("cpu", "cuda"):
        more = ["--prompt", "a grid", "--seeds", "0,7", "--output", str(tmp_path / device)]
        with on(device):
            options = arguments(tiny_flux_dir, tmp_path)
            assert load_script("generate").main([*options, *more]) == 0
        with Image.open(tmp_path / device / "00000_seed7.png") as image:
            pixels[device] = np.asarray(image, dtype=np.int16)
    assert np.abs(pixels["cuda"] - pixels["cpu"]).max() <= 1


def run_program(command: list[str], **variables: str) -> str:
    paths = [
        ROOT,
        ROOT / "tests",
        ROOT.parent / "PaCo-Reward" / "judge",
        ROOT.parent / "quickstart",
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))} | variables
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, *command], timeout=500, check=False, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("sharding", ["None", "fsdp2"])
def test_two_gpus_end_as_two_cpus(tiny_flux_dir, tmp_path, sharding):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    weights = {}
    for device in ("cpu", "cuda"):
        folder = tmp_path / device
        options = arguments(tiny_flux_dir, folder, eval_freq="1", train__sharding=sharding)
        program = [str(ROOT / "scripts" / "train.py"), *options]
        if device == "cpu":
            run_program([*launcher, *program], ACCELERATE_USE_CPU="true")
        else:
            run_program([*launcher, GPU, *program], PRETENDED_GPUS="2")

        state = folder / "runs" / "run" / "checkpoints" / "epoch_0002" / "state"
        plan = json.loads((folder / "runs" / "run" / "plan.json").read_text())
        assert (plan["device"] == "Pretended GPU") == (device == "cuda")
        weights[device] = load_file(state / "trainable.safetensors")
    torch.testing.assert_close(weights["cuda"], weights["cpu"], rtol=1e-4, atol=1e-5)
