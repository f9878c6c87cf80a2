"""A reward behind the service scores as it does in process; errors, keys, limits and silence reach
the run.
"""

import base64
import contextlib
import io
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
from starlette.testclient import TestClient
from wired import IMAGES, ITEMS, MODELS, respond, shown_to_judge

from paco_grpo.rewards.registry import build_rewards
from paco_grpo.rewards.remote.service import build_app, main
from paco_grpo.rewards.remote.wire import decode_request, decode_scores, encode_request
from paco_grpo.types import Item
from paco_judge import transport
from paco_judge.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def running(command, port: int, seconds: float = 60, **environment: str):
    """The URL of a service in its own process group, which has so many seconds to come up."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT.parent / "PaCo-Reward" / "judge", ROOT / "tests")))
    process = subprocess.Popen(
        [*command, "--port", str(port)],
        env=os.environ | {"PYTHONPATH": paths} | environment,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + seconds
    try:
        while True:
            in_time = time.monotonic() < deadline
            assert process.poll() is None and in_time, "the service did not come up"
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
    start = (
        "import sys; sys.modules['torch'] = None; "
        "import paco_grpo.rewards.edit_score, paco_grpo.rewards.identity; "
        "from paco_grpo.rewards.remote.service import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", start, "--reward", name]
    with running(command, free_port(), REWARD_SERVICE_KEY="secret") as url:
        with pytest.raises(UserError, match="401.*REWARD_SERVICE_KEY"):
            remote(name, url).check()
        monkeypatch.setenv("REWARD_SERVICE_KEY", "secret")
        remote(name, url).check()
        monkeypatch.delenv("REWARD_SERVICE_KEY")
        reward = remote(name, url, api_key="secret", request_size=2)
        reward.check()
        scores = reward(IMAGES, ITEMS)
        np.testing.assert_array_equal(scores, build_rewards({name: 1.0})["gaps"](IMAGES, ITEMS))
        assert np.isnan(scores).tolist() == [item.item_id % 2 == 1 for item in ITEMS]
        with pytest.raises(UserError, match="ValueError"):
            reward(IMAGES[:1], [Item(0, "fail")])


def test_without_a_service_scores_are_missing_and_check_is_an_error(caplog):
    url = f"http://127.0.0.1:{free_port()}"
    reward = remote("jpeg_compressibility", url, deadline_s=0.5, request_size=99)
    with pytest.raises(UserError, match="jpeg_compressibility.*base_url="):
        reward.check()
    assert np.isnan(reward(IMAGES, ITEMS)).all()
    assert f"{len(IMAGES)} scores" in caplog.text


@pytest.mark.parametrize(
    ("body", "scores"),
    [
        ({"scores": [1, 0.25, None]}, [1.0, 0.25, math.nan]),
        ({"scores": "012"}, None),
        ({"scores": ["1_0", 2.0, 3.0]}, None),
        ({"scores": [True, 2.0, 3.0]}, None),
        ({"scores": [1.0, 2.0]}, None),
        ({"rewards": [1.0, 2.0, 3.0]}, None),
        ([1.0, 2.0, 3.0], None),
    ],
)
def test_scores_are_a_list_of_numbers_or_null(body, scores):
    content = json.dumps(body).encode()
    if scores is not None:
        np.testing.assert_array_equal(decode_scores(content, 3), scores)
    else:
        with pytest.raises(ValueError, match="scores"):
            decode_scores(content, 3)


def flow_factory_request(images, items, with_references: bool) -> dict:
    """What Flow-Factory's RemotePointwiseRewardModel posts to /compute."""

    def encode(image):
        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        return base64.b64encode(buffer.getvalue()).decode()

    request = dict.fromkeys(("video", "condition_images", "condition_videos"))
    request |= {"prompt": [item.prompt for item in items], "image": list(map(encode, images))}
    if with_references:
        request["condition_images"] = [list(map(encode, item.images)) for item in items]
    return request


def test_a_service_says_whose_scores_it_gives(monkeypatch):
    """Its reward, with arguments that change scores, but not where it is."""
    told = []
    for quality in (80, 80, 95):
        kwargs = {"jpeg_compressibility": {"quality": quality}}
        served = build_rewards({"jpeg_compressibility": 1.0}, kwargs)["jpeg_compressibility"]
        service = TestClient(build_app(served, "jpeg_compressibility"))

        async def get(method, address, *_, service=service):
            return service.get(address).content

        monkeypatch.setattr(transport, "request", get)
        reward = remote("jpeg_compressibility", "http://127.0.0.1:1", deadline_s=quality)
        told.append(reward.identity())
    assert told[0] == told[1] != told[2] and told[0]["weights"]
    monkeypatch.undo()
    with fake_judge.FakeJudge() as judge:
        judge.identities = {"Paco-Reward-7B": None}
        kwargs = {"consistency_score": {"base_url": judge.url}}
        silent = build_rewards({"consistency_score": 1.0}, kwargs)["consistency_score"]
        service = TestClient(build_app(silent, "consistency_score"))
        assert service.get("/health").json()["identity"] is None


@pytest.mark.parametrize("name", ["consistency_score", "consistency_for_editing"])
def test_flow_factory_gets_the_scores_of_its_batch(name):
    with fake_judge.FakeJudge(respond, models=MODELS) as judge:
        reward = build_rewards({name: 1.0}, {name: {"base_url": judge.url}})[name]
        client = TestClient(build_app(reward, name))
        assert client.get("/health").is_success
        request = flow_factory_request(IMAGES, ITEMS, name == "consistency_for_editing")
        answer = client.post("/compute", json=request).json()
        assert answer == {"rewards": pytest.approx(reward(IMAGES, ITEMS))}
        # It has no word for a missing score, and 0 would be one.
        judge.respond = lambda number, request: (400, {}, {})
        answer = client.post("/compute", json=request).json()
        assert "rewards" not in answer and f"{len(IMAGES)} of" in answer["error"]
        for wrong in ({"image": None}, {"prompt": "a" * len(IMAGES)}):
            assert "error" in client.post("/compute", json=request | wrong).json()


def test_a_request_is_told_what_it_lacks():
    reward = build_rewards({"kept_pixels": 1.0})["kept_pixels"]
    client = TestClient(build_app(reward, "kept_pixels"))
    request = flow_factory_request(IMAGES, ITEMS, with_references=False)
    answer = client.post("/compute", json=request).json()
    assert "a reference image" in answer["error"] and "AttributeError" not in answer["error"]
    request["condition_images"] = request["image"]
    assert "'condition_images'" in client.post("/compute", json=request).json()["error"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("jpeg_compressibility --host 0.0.0.0", "REWARD_SERVICE_KEY"),
        ("reward_factories:unlike_others", "compares the images of a group"),
        ('reward_factories:seeds_of --kwargs {"factor":2}', "has seeds, epoch or begin"),
    ],
)
def test_command_line_mistakes(words, named, capsys, monkeypatch):
    monkeypatch.delenv("REWARD_SERVICE_KEY", raising=False)
    try:
        status = main(["--reward", *words.split()])
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and named in capsys.readouterr().err


def test_images_and_items_arrive_and_an_item_is_sent_once():
    several = Item(9, 'say "é"', 64, 32, {"idx": "x"}, tuple(IMAGES[:3]), dataset=2)
    items = [*ITEMS[1:], several]
    body = encode_request(IMAGES, items)
    assert len(json.loads(body)["items"]) == len({item.item_id for item in items})
    images, arrived = decode_request(body)
    assert [image.tobytes() for image in images] == [image.tobytes() for image in IMAGES]
    for item, before in zip(arrived, items, strict=True):
        for name in ("item_id", "prompt", "height", "width", "dataset", "metadata"):
            assert getattr(item, name) == getattr(before, name)
        references = [image.tobytes() for image in item.images]
        assert references == [image.tobytes() for image in before.images]


@pytest.mark.long
def test_edit_score_runs_in_its_own_environment(tmp_path):
    """Its package is not in this environment."""
    with pytest.raises(UserError, match="reward_service.sh edit_score"):
        build_rewards({"edit_score": 1.0})

    def respond_unless_second(number, request):
        """Nonsense about the quality of the second image."""
        if shown_to_judge(request)[1] != IMAGES[1].tobytes():
            return respond(number, request)
        return 200, fake_judge.written("I cannot say."), {}

    with fake_judge.FakeJudge(respond_unless_second, models=MODELS) as judge:
        command = ["bash", str(ROOT / "scripts" / "reward_service.sh"), "edit_score"]
        command += ["--kwargs", json.dumps({"base_url": judge.url})]
        environment = {
            "PYTHON": sys.executable,
            "REWARD_ENVIRONMENT": str(tmp_path / "env"),
            "PYTHONPATH": "",
        }
        with running(command, free_port(), seconds=400, **environment) as url:  # it installs
            reward = remote("edit_score", url)
            reward.check()
            scores = reward(IMAGES[:3], ITEMS[:3])
    assert np.isnan(scores).tolist() == [False, True, False] and scores[0] != scores[2]
    packages = {path.name for path in (tmp_path / "env").glob("lib/python*/site-packages/*")}
    assert "editscore" in packages and not packages & {"torch", "diffusers"}
