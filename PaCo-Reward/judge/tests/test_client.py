import asyncio
import base64
import importlib.util
import io
import logging
import multiprocessing
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paco_judge import transport
from paco_judge.client import JudgeClient, JudgeModelMissing, JudgeUnavailable, Pair
from paco_judge.grid import pairs, split_image
from paco_judge.images import UnreadableImage, content_digest, png_data_url
from paco_judge.questions import build_messages, theme_question

_spec = importlib.util.spec_from_file_location("fake_judge", Path(__file__).with_name("fake_judge.py"))
fake_judge = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake_judge)
FakeJudge, answer = fake_judge.FakeJudge, fake_judge.answer


def picture(seed: int, size: int = 16) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8))


def client(judge: FakeJudge, **settings) -> JudgeClient:
    settings.setdefault("model", judge.models[0] if judge.models else None)
    return JudgeClient(judge.url, **({"deadline_s": 20.0} | settings))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_request_is_what_the_protocol_says():
    with FakeJudge() as judge:
        image_a, image_b, question = picture(1), picture(2), 'a "quoted" thème\n'
        (verdict,) = client(judge).score_blocking([Pair(image_a, image_b, question)])
    (request,) = judge.requests
    assert verdict.p_yes == pytest.approx(0.75)
    assert request["messages"] == build_messages(png_data_url(image_a), png_data_url(image_b), question)
    rest = {key: value for key, value in request.items() if key != "messages"}
    assert rest == {
        "model": "Paco-Reward-7B", "max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 20
    }  # fmt: skip


def test_one_image_alone_is_asked_about_and_cached_apart_from_pairs():
    image, question = picture(1), "is it a grid?"
    with FakeJudge(lambda number, request: (200, answer(0.2 * number), {})) as judge:
        judging = client(judge)
        alone, twice, again = (
            judging.score_blocking([pair])[0].p_yes
            for pair in (Pair(image, None, question), Pair(image, image, question), Pair(image, None, question))
        )
    assert (alone, twice, again) == pytest.approx((0.2, 0.4, 0.2))
    assert judge.requests[0]["messages"] == build_messages(png_data_url(image), None, question)
    assert [len(request["messages"][0]["content"]) for request in judge.requests] == [2, 3]


def test_images_arrive_pixel_by_pixel():
    image = picture(3, size=33)
    data = base64.b64decode(png_data_url(image).removeprefix("data:image/png;base64,"))
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(data))), np.asarray(image))


def test_one_grid_costs_six_requests_and_each_image_is_encoded_once(monkeypatch):
    encoded = []
    monkeypatch.setattr("paco_judge.images.png_data_url", lambda image: encoded.append(image) or png_data_url(image))
    cells = split_image(picture(4, size=64), 2, 2)
    batch = [Pair(cells[i], cells[j], theme_question("a star.")) for i, j in pairs(4)]
    with FakeJudge() as judge:
        scorer = client(judge)
        assert [verdict.ok for verdict in scorer.score_blocking(batch)] == [True] * 6
        assert len(judge.requests) == 6 and len(encoded) == 4
        scorer.score_blocking(batch)
        client(judge).score_blocking([Pair(p.image_a.copy(), p.image_b.copy(), p.question) for p in batch])
        assert len(judge.requests) == 6, "the second identical call makes no request, nor does another client's"
        assert judge.model_requests == 2, "once for each client"


def test_identical_pairs_are_asked_once_also_at_the_same_time():
    with FakeJudge(delay_s=0.2) as judge:
        scorer = client(judge)
        scorer.check()
        batch = [Pair(picture(5), picture(6), "q")] * 5 + [Pair(picture(6), picture(5), "q")]
        threads = [threading.Thread(target=scorer.score_blocking, args=(batch,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(judge.requests) == 2, "the two orders of a pair are two questions"


def test_the_cache_knows_question_model_and_server_and_can_be_left_out():
    pair = Pair(picture(7), picture(8), "q")
    with FakeJudge(models=("a", "b")) as judge, FakeJudge(models=("a", "b")) as other:
        client(judge).score_blocking([pair])
        client(judge).score_blocking([Pair(pair.image_a, pair.image_b, "q2")])
        client(judge, model="b").score_blocking([pair])
        client(other).score_blocking([pair])
        assert (len(judge.requests), len(other.requests)) == (3, 1)
        client(judge, cache=False).score_blocking([pair, pair])
        assert len(judge.requests) == 4


def test_concurrency_is_bounded_and_connections_are_kept():
    batch = [Pair(picture(i), picture(i + 1), "bounded") for i in range(100, 140)]
    with FakeJudge(delay_s=0.01) as judge:
        client(judge, max_concurrency=5).score_blocking(batch)
        assert judge.max_in_flight <= 5
        assert len(judge.connections) <= 6


def test_verdicts_come_in_the_order_of_the_pairs():
    def respond(number, request):
        return 200, answer(float(request["messages"][0]["content"][2]["text"])), {}

    chances = [0.1, 0.9, 0.3, 0.7, 0.5, 0.2]
    with FakeJudge(respond) as judge:
        verdicts = client(judge).score_blocking([Pair(picture(9), picture(10), str(chance)) for chance in chances])
    assert [verdict.p_yes for verdict in verdicts] == pytest.approx(chances)


async def test_async_form_from_a_callers_loop():
    with FakeJudge() as judge:
        scorer = client(judge)
        assert await scorer.check_async() == "Paco-Reward-7B"
        first, second = await asyncio.gather(
            scorer.score([Pair(picture(11), picture(12), "q")]), scorer.score([Pair(picture(13), picture(14), "q")])
        )
        assert first[0].ok and second[0].ok


@pytest.mark.parametrize("fault", [429, 500, 503, None])
def test_passing_faults_are_tried_again(fault):
    def respond(number, request):
        if number <= 2:
            return None if fault is None else (fault, {"error": {"message": "busy"}}, {})
        return 200, answer(0.6), {}

    with FakeJudge(respond) as judge:
        (verdict,) = client(judge).score_blocking([Pair(picture(15), picture(16), str(fault))])
        assert verdict.p_yes == pytest.approx(0.6) and len(judge.requests) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 413])
def test_other_errors_are_not_tried_again_and_name_their_cause(status):
    with FakeJudge(lambda number, request: (status, {"error": {"message": "no such thing"}}, {})) as judge:
        (verdict,) = client(judge).score_blocking([Pair(picture(17), picture(18), "q")])
        assert verdict.p_yes is None and f"HTTP {status}: no such thing" in verdict.error
        assert len(judge.requests) == 1


def test_retry_after_is_respected():
    moments = []

    def respond(number, request):
        moments.append(time.monotonic())
        return (429, {}, {"retry-after": "0.8"}) if number == 1 else (200, answer(0.5), {})

    with FakeJudge(respond) as judge:
        assert client(judge).score_blocking([Pair(picture(19), picture(20), "q")])[0].ok
    assert moments[1] - moments[0] >= 0.79


@pytest.mark.parametrize(
    "respond",
    [
        lambda number, request: (503, {"error": {"message": "loading"}}, {}),
        lambda number, request: time.sleep(5),
        lambda number, request: (200, b'{"choi', {"content-length": "500"}),
    ],
    ids=["5xx", "hang", "half an answer"],
)
def test_the_deadline_bounds_everything(respond):
    with FakeJudge(respond) as judge:
        scorer = client(judge, deadline_s=1.0)
        scorer.check()
        start = time.monotonic()
        verdicts = scorer.score_blocking([Pair(picture(i), picture(21), "deadline") for i in range(8)])
        assert time.monotonic() - start < 2.0
    assert all("deadline" in verdict.error for verdict in verdicts)


@pytest.mark.parametrize(
    "body", [b"<html>hello</html>", b"{}", b'{"choices": []}', b'{"choices": [{"logprobs": null}]}']
)
def test_garbage_is_an_error_and_is_not_cached(body):
    with FakeJudge(lambda number, request: (200, body, {})) as judge:
        scorer, pair = client(judge), Pair(picture(22), picture(23), "garbage")
        assert "cannot be read" in scorer.score_blocking([pair])[0].error
        judge.respond = lambda number, request: (200, answer(0.5), {})
        assert scorer.score_blocking([pair])[0].ok


def test_neither_yes_nor_no_is_no_score():
    reply = answer(0.5)
    for entry in reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        entry["token"] = entry["token"].lower()
    with FakeJudge(lambda number, request: (200, reply, {})) as judge:
        pair = Pair(picture(24), picture(25), "neither")
        (verdict,) = client(judge).score_blocking([pair])
        assert verdict.p_yes is None and "neither Yes nor No" in verdict.error
        assert client(judge, variants=True).score_blocking([pair])[0].p_yes == pytest.approx(0.5)


def test_a_server_restarted_within_the_deadline_is_waited_for():
    with FakeJudge() as judge:
        scorer = client(judge, deadline_s=20.0)
        scorer.check()
        port = judge.port
    answers = []
    waiting = threading.Thread(
        target=lambda: answers.extend(scorer.score_blocking([Pair(picture(26), picture(27), "late")]))
    )
    waiting.start()
    time.sleep(0.7)
    assert not answers
    with FakeJudge(port=port):
        waiting.join(timeout=15)
    assert answers[0].ok


def test_judge_not_running_is_said_at_once():
    start = time.monotonic()
    scorer = JudgeClient(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(JudgeUnavailable, match=r"no judge answers at .*launch\.sh"):
        scorer.check()
    with pytest.raises(JudgeUnavailable):
        scorer.score_blocking([Pair(picture(28), picture(29), "q")])
    assert time.monotonic() - start < 3


def test_missing_model_lists_what_is_served():
    with FakeJudge(models=("Qwen", "other")) as judge, pytest.raises(JudgeModelMissing, match="'Qwen', 'other'"):
        client(judge, model="PaCo-Reward-7B").check()
    with FakeJudge(models=()) as judge, pytest.raises(JudgeModelMissing, match="it serves nothing"):
        client(judge, model="x").check()


def test_a_name_that_differs_only_by_case_is_taken_and_said(caplog):
    with FakeJudge(models=("Paco-Reward-7B",)) as judge, caplog.at_level(logging.WARNING):
        scorer = client(judge, model="PaCo-Reward-7B")
        assert scorer.check() == "Paco-Reward-7B"
        scorer.score_blocking([Pair(picture(30), picture(31), "q")])
    assert judge.requests[0]["model"] == "Paco-Reward-7B"
    assert "differs only by letter case" in caplog.text


def test_something_else_on_the_port_is_said():
    with FakeJudge() as judge:
        judge.models = None
        with pytest.raises(JudgeUnavailable):
            client(judge, model="x").check()


def test_the_key_is_sent():
    with FakeJudge() as judge:
        client(judge, api_key="secret").score_blocking([Pair(picture(32), picture(33), "q")])
        assert judge.headers[0]["authorization"] == "Bearer secret"


def test_an_unreadable_image_costs_only_its_own_pairs(tmp_path):
    path = tmp_path / "half.png"
    picture(34, size=64).save(path)
    path.write_bytes(path.read_bytes()[:3000])
    broken = Image.open(path)
    with FakeJudge() as judge:
        bad, good = client(judge).score_blocking([Pair(broken, picture(35), "q"), Pair(picture(36), picture(37), "q")])
    assert "half.png cannot be read" in bad.error and good.ok
    with pytest.raises(UnreadableImage, match=r"half\.png"):
        png_data_url(broken)


def test_digest_is_by_content():
    image = picture(38)
    assert content_digest(image) == content_digest(image.copy())
    assert content_digest(image) == content_digest(image.convert("RGBA"))
    assert content_digest(image) != content_digest(picture(39))
    flat = Image.new("RGB", (2, 8))
    assert content_digest(flat) != content_digest(Image.new("RGB", (8, 2)))


def _score_in_child(url, queue):
    queue.put(JudgeClient(url, "m", deadline_s=10).score_blocking([Pair(picture(40), picture(41), "child")])[0].ok)


def test_a_forked_child_gets_its_own_thread():
    with FakeJudge(models=("m",)) as judge:
        client(judge).score_blocking([Pair(picture(40), picture(42), "parent")])
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=_score_in_child, args=(judge.url, queue))
        child.start()
        assert queue.get(timeout=10)
        child.join(timeout=10)


def test_the_cache_forgets_the_oldest():
    cache = transport.Cache(entries=2)
    cache.put(("a",), 0.1)
    cache.put(("b",), 0.2)
    assert cache.get(("a",)) == 0.1
    cache.put(("c",), 0.3)
    assert (cache.get(("a",)), cache.get(("b",)), len(cache)) == (0.1, None, 2)


@pytest.mark.parametrize("settings", [{"base_url": "localhost:8000"}, {"max_concurrency": 0}, {"deadline_s": 0}])
def test_bad_settings_are_said(settings):
    with pytest.raises(ValueError):
        JudgeClient(**settings)
