"""A reward behind the service scores as it does in process; errors, keys, limits and silence reach
the run.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from fakes import fake_judge, free_port
from PIL import Image

from paco_grpo.rewards.registry import RewardError, build_rewards
from paco_grpo.rewards.remote.service import main
from paco_grpo.rewards.remote.wire import decode_request, decode_scores, encode_request
from paco_grpo.types import Item
from paco_judge.images import data_url

ROOT = Path(__file__).resolve().parents[2]


def noise(seed: int, size: int = 24) -> Image.Image:
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    )


IMAGES = [noise(i) for i in range(5)]
ITEMS = [Item(i % 2, f"item {i % 2}", metadata={"idx": i % 2}) for i in range(5)]


@contextlib.contextmanager
def running(command, port: int, **environment: str):
    """The URL of a service in its own process group."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT.parent / "PaCo-Reward" / "judge", ROOT / "tests")))
    environment = os.environ | {"PYTHONPATH": paths} | environment
    process = subprocess.Popen(
        [*command, "--port", str(port)], env=environment, start_new_session=True
    )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 400
    try:
        while True:
            assert process.poll() is None and time.monotonic() < deadline, (
                "the service did not come up"
            )
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"{url}/health", timeout=5)
                break
            time.sleep(0.1)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=30)


def remote(name: str, url: str, **kwargs):
    return build_rewards({name: 1.0}, {name: {"server": url, "deadline_s": 20.0} | kwargs})[
        name.rpartition(":")[2]
    ]


def test_a_service_scores_as_in_process_and_its_refusals_are_errors(monkeypatch):
    name = "reward_factories:gaps"
    # A service's environment need not have torch.
    start = "import sys; sys.modules['torch'] = None; from paco_grpo.rewards.remote.service import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", start, "--reward", name]
    with running(command, free_port(), REWARD_SERVICE_KEY="secret") as url:
        with pytest.raises(RewardError, match="401.*REWARD_SERVICE_KEY"):
            remote(name, url).check()
        monkeypatch.setenv("REWARD_SERVICE_KEY", "secret")
        remote(name, url).check()
        monkeypatch.delenv("REWARD_SERVICE_KEY")
        reward = remote(name, url, api_key="secret", request_size=2)
        reward.check()
        scores = reward(IMAGES, ITEMS)
        np.testing.assert_array_equal(scores, build_rewards({name: 1.0})["gaps"](IMAGES, ITEMS))
        assert np.isnan(scores).tolist() == [False, True, False, True, False]
        with pytest.raises(RewardError, match="ValueError: cannot score 'fail'"):
            reward(IMAGES[:1], [Item(0, "fail")])


def test_without_a_service_scores_are_missing_and_check_is_an_error(caplog):
    reward = remote("jpeg_compressibility", f"http://127.0.0.1:{free_port()}", deadline_s=0.5)
    with pytest.raises(
        RewardError,
        match="scripts/reward_service.sh jpeg_compressibility --port.*a judge is base_url=",
    ):
        reward.check()
    assert np.isnan(reward(IMAGES, ITEMS)).all()
    assert "5 scores are missing" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--reward", "jpeg_compressibility", "--host", "0.0.0.0"], "REWARD_SERVICE_KEY"),
        (
            ["--reward", "grid_layout", "--kwargs", '{"base_url": "http://127.0.0.1:9"}'],
            "127.0.0.1:9",
        ),
        (["--reward", "reward_factories:unlike_others"], "compares the images of a group"),
    ],
)
def test_command_line_mistakes(arguments, named, capsys, monkeypatch):
    monkeypatch.delenv("REWARD_SERVICE_KEY", raising=False)
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and named in capsys.readouterr().err


def test_images_and_items_arrive_and_an_item_is_sent_once():
    grid = Item(4, 'say "é"', 64, 32, metadata={"criteria": {"Style": {"a": None}}, "idx": "x"})
    edit = Item(2, "edit", references=(lambda: noise(9), noise(8), lambda: noise(7)))
    items = [grid, edit, grid, edit]
    body = encode_request(IMAGES[:4], items)
    assert len(json.loads(body)["items"]) == 2
    images, arrived = decode_request(body)
    for image, sent, item, before in zip(images, IMAGES[:4], arrived, items, strict=True):
        assert np.array_equal(image, sent)
        for name in ("item_id", "prompt", "height", "width", "metadata"):
            assert getattr(item, name) == getattr(before, name)
        assert [image.tobytes() for image in item.images] == [
            image.tobytes() for image in before.images
        ]


@pytest.mark.parametrize(
    "scores",
    ["01", {"0": 1, "1": 2}, [1], [1, 2, 3], [1, "0.5"], [1, True], [1, [2]], None, "absent"],
)
def test_an_answer_that_is_no_list_of_numbers_and_nulls_is_refused(scores):
    answer = {} if scores == "absent" else {"scores": scores}
    with pytest.raises(ValueError, match="score"):
        decode_scores(json.dumps(answer).encode(), 2)
    with pytest.raises(ValueError, match="score"):
        decode_scores(json.dumps(scores).encode(), 2)
    np.testing.assert_equal(decode_scores(b'{"scores": [3, null]}', 2), [3, np.nan])


COLORS = {"red": 4, "blue": 20, "green": 25, "black": 10, "gray": math.nan}  # of the edit → score


@pytest.mark.long
def test_edit_score_runs_in_its_own_environment(tmp_path):
    """Its package is not in this environment."""
    images = [Image.new("RGB", (16, 16), color) for color in COLORS]
    items = [
        Item(i, "paint it", references=(Image.new("RGB", (16, 16), "white"),))
        for i in range(len(images))
    ]
    color_of = {data_url(image): color for image, color in zip(images, COLORS, strict=True)}

    def respond(number, request):
        """Reasons and two scores of 25, as EditScore answers; nonsense about black images."""
        parts = request["messages"][0]["content"]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        pictures = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        color = color_of[pictures[-1]]
        assert texts[:-1] == [f"<img{i + 1}>: " for i in range(len(pictures))]
        assert ("Editing instruction: paint it" in texts[-1]) == (len(pictures) == 2)
        scores = [24, COLORS[color]] if len(pictures) == 2 else [23, 22]
        text = (
            "I cannot say."
            if color == "black"
            else json.dumps({"reasoning": "as it is", "score": scores})
        )
        return (
            200,
            {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]},
            {},
        )

    with pytest.raises(RewardError, match="reward_service.sh edit_score"):
        build_rewards({"edit_score": 1.0})
    with fake_judge.FakeJudge(respond, models=["EditScore-7B"]) as judge:
        command = ["bash", str(ROOT / "scripts" / "reward_service.sh"), "edit_score"]
        command += ["--kwargs", json.dumps({"base_url": judge.url})]
        environment = {
            "PYTHON": sys.executable,
            "REWARD_ENVIRONMENT": str(tmp_path / "env"),
            "PYTHONPATH": "",
        }
        with running(command, free_port(), **environment) as url:
            reward = remote("edit_score", url)
            reward.check()
            scores = reward(images, items)
    expected = [math.sqrt(min(COLORS[c], 24) / 25 * 22 / 25) for c in ("red", "blue", "green")]
    assert scores[:3] == pytest.approx(expected) and np.isnan(scores[3:]).all()
    packages = {path.name for path in (tmp_path / "env").glob("lib/python*/site-packages/*")}
    assert "editscore" in packages and not packages & {"torch", "diffusers"}
