"""A reward behind the service scores as it does in process; errors, keys, limits and silence reach the run."""

import asyncio
import json
import math
import sys
import threading

import httpx
import numpy as np
import pytest
from fakes import fake_judge
from PIL import Image
from serving_reward import ROOT, free_port, remote, running, service

from paco_grpo.rewards.registry import RewardError, build_rewards
from paco_grpo.rewards.remote.service import build_app, main
from paco_grpo.rewards.remote.wire import encode_request
from paco_grpo.types import Item
from paco_judge.images import data_url

IMAGES = [Image.fromarray(np.random.default_rng(i).integers(0, 255, (24, 24, 3), dtype=np.uint8)) for i in range(5)]
ITEMS = [Item(i % 2, f"item {i % 2}", metadata={"idx": i % 2}) for i in range(5)]


@pytest.fixture(scope="module")
def jpeg_url():
    with service("--reward", "jpeg_compressibility", "--kwargs", '{"quality": 50}', "--max-body-mb", "1") as url:
        yield url


def test_remote_scores_are_the_local_ones(jpeg_url):
    local = build_rewards({"jpeg_compressibility": 1.0}, {"jpeg_compressibility": {"quality": 50}})
    reward = remote("jpeg_compressibility", jpeg_url, request_size=2)
    reward.check()
    assert np.array_equal(reward(IMAGES, ITEMS), local["jpeg_compressibility"](IMAGES, ITEMS))


def test_a_body_that_is_too_large_is_refused_while_it_arrives(jpeg_url):
    def chunks():
        for _ in range(64):
            yield b" " * (1 << 16)

    refused = httpx.post(f"{jpeg_url}/score", content=chunks(), timeout=30)
    assert refused.status_code == 413
    large = Image.fromarray(np.random.default_rng(0).integers(0, 255, (800, 800, 3), dtype=np.uint8))
    with pytest.raises(RewardError, match="1048576 bytes.*request_size"):
        remote("jpeg_compressibility", jpeg_url)([large], ITEMS[:1])


def test_missing_stays_missing_a_failure_is_an_error_and_a_key_is_required():
    with service("--reward", "reward_factories:gaps", REWARD_SERVICE_KEY="secret") as url:
        with pytest.raises(RewardError, match="401.*api_key"):
            remote("reward_factories:gaps", url).check()
        reward = remote("reward_factories:gaps", url, api_key="secret")
        reward.check()
        scores = reward(IMAGES, ITEMS)
        assert np.isnan(scores[[1, 3]]).all() and np.isfinite(scores[[0, 2, 4]]).all()
        with pytest.raises(RewardError, match="ValueError: cannot score 'fail'"):
            reward(IMAGES[:1], [Item(0, "fail")])


def test_without_a_service_scores_are_missing_and_check_is_an_error(caplog):
    reward = remote("jpeg_compressibility", f"http://127.0.0.1:{free_port()}", deadline_s=0.5)
    with pytest.raises(RewardError, match="scripts/reward_service.sh jpeg_compressibility --port"):
        reward.check()
    assert np.isnan(reward(IMAGES, ITEMS)).all()
    assert "5 scores are missing" in caplog.text


async def test_a_request_whose_caller_leaves_before_its_turn_is_not_scored():
    begun, finish = [], threading.Event()

    def slow(images, items):
        begun.append(items[0].prompt)
        assert finish.wait(60)
        return np.zeros(len(images))

    async with httpx.AsyncClient(transport=httpx.ASGITransport(build_app(slow, "slow")), base_url="http://s") as http:
        bodies = [encode_request(IMAGES[:1], [Item(0, prompt)]) for prompt in ("first", "left", "last")]
        first = asyncio.create_task(http.post("/score", content=bodies[0], timeout=60))
        while not begun:
            await asyncio.sleep(0.01)
        left = asyncio.create_task(http.post("/score", content=bodies[1], timeout=60))
        await asyncio.sleep(0.1)
        left.cancel()
        last = asyncio.create_task(http.post("/score", content=bodies[2], timeout=60))
        await asyncio.sleep(0.1)
        finish.set()
        assert [(await first).status_code, (await last).status_code] == [200, 200]
    assert begun == ["first", "last"]


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"server": "http://x", "quality": 3}, "'quality'.*--kwargs"),
        ({"server": "http://x", "deadline": 3}, "Did you mean 'deadline_s'"),
        ({"server": "http://x", "request_size": 0}, "request_size >= 1"),
    ],
)
def test_arguments_of_a_remote_reward(kwargs, named):
    with pytest.raises(RewardError, match=named):
        build_rewards({"jpeg_compressibility": 1}, {"jpeg_compressibility": kwargs})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--reward", "jpeg_compresibility"], "Did you mean 'jpeg_compressibility'"),
        (["--reward", "jpeg_compressibility", "--kwargs", "{"], "--kwargs"),
        (["--reward", "jpeg_compressibility", "--host", "0.0.0.0"], "REWARD_SERVICE_KEY"),
        (["--reward", "grid_layout", "--kwargs", '{"base_url": "http://127.0.0.1:9"}'], "127.0.0.1:9"),
    ],
)
def test_command_line_mistakes(arguments, named, capsys, monkeypatch):
    monkeypatch.delenv("REWARD_SERVICE_KEY", raising=False)
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and named in capsys.readouterr().err


COLORS = {"red": 4, "blue": 20, "green": 25, "black": 10}  # color of the edit → score of the stand-in for EditScore


@pytest.mark.long
def test_edit_score_runs_in_its_own_environment(tmp_path):
    """EditScore, whose package is not in this environment, in a real one behind the service."""
    images = [Image.new("RGB", (16, 16), color) for color in COLORS]
    items = [Item(i, "paint it", image=Image.new("RGB", (16, 16), "white")) for i in range(len(images))]
    color_of = {data_url(image): color for image, color in zip(images, COLORS, strict=True)}

    def respond(number, request):
        """Reasons and two scores of 25, as EditScore answers; nonsense about black images."""
        parts = request["messages"][0]["content"]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        pictures = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        color = color_of[pictures[-1]]
        assert texts[:-1] == [f"<img{i + 1}>: " for i in range(len(pictures))]
        assert ("Editing instruction: paint it" in texts[-1]) == (len(pictures) == 2)
        assert "scale 0 to 25" in texts[-1]
        scores = [COLORS[color], 24] if len(pictures) == 2 else [23, 22]
        text = "I cannot say." if color == "black" else json.dumps({"reasoning": "as it is", "score": scores})
        return 200, {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}, {}

    with pytest.raises(RewardError, match="reward_service.sh edit_score"):
        build_rewards({"edit_score": 1.0})
    port = free_port()
    with fake_judge.FakeJudge(respond, models=["EditScore-7B"]) as judge:
        command = ["bash", str(ROOT / "scripts" / "reward_service.sh"), "edit_score", "--port", str(port)]
        command += ["--kwargs", json.dumps({"base_url": judge.url})]
        environment = {"PYTHON": sys.executable, "REWARD_ENVIRONMENT": str(tmp_path / "env")}
        with running(command, f"http://127.0.0.1:{port}", seconds=400, **environment) as url:
            reward = remote("edit_score", url)
            reward.check()
            scores = reward(images, items)
    expected = [math.sqrt(min(COLORS[c], 24) / 25 * 22 / 25) for c in COLORS if c != "black"]
    assert scores[:3] == pytest.approx(expected) and np.isnan(scores[3])
    packages = {path.name for path in (tmp_path / "env").glob("lib/python*/site-packages/*")}
    assert "editscore" in packages and not packages & {"torch", "diffusers"}
