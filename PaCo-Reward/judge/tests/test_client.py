"""The client against servers on loopback, good ones and broken ones."""

import base64
import gc
import io
import json
import time

import pytest
from fakes import fake_judge
from PIL import Image
from tiny_judge import picture

from paco_judge import transport
from paco_judge.client import JudgeClient, asking_order
from paco_judge.errors import UserError
from paco_judge.images import data_url
from paco_judge.questions import Pair, RequestForm, build_messages
from paco_judge.verdict import Answer

FakeJudge, answer = fake_judge.FakeJudge, fake_judge.answer
PAIR = Pair(picture(1), picture(2), "same?")


def jpeg_url(image: Image.Image) -> str:
    """As the published script sends images: a JPEG of quality 75, Pillow's default."""
    image.save(file := io.BytesIO(), "JPEG", quality=75)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def client(judge: FakeJudge, **settings) -> JudgeClient:
    return JudgeClient(judge.url, **({"model": judge.models[0], "deadline_s": 20.0} | settings))


@pytest.mark.parametrize("form", [RequestForm(), RequestForm('"url": "" {n}', "jpeg")])
def test_the_request_follows_the_protocol(form):
    """Its JSON is put together around the images' URLs, without escaping them."""
    pair = Pair(picture(1), picture(2), 'thème\n\x00\u2028 {"url": ""}, \\"url": ""')
    with FakeJudge() as judge:
        (verdict,) = client(judge, form=form).score([pair])
    assert verdict.p_yes == pytest.approx(0.75)
    url_of = data_url if form.image_format == "png" else jpeg_url
    urls = [url_of(image) for image in pair.images]
    assert judge.requests == [
        {
            "model": "Paco-Reward-7B",
            "messages": build_messages(urls, pair.question, form),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 20,
        }
    ]


def test_verdicts_are_in_the_order_of_the_pairs_and_few_requests_in_flight():
    in_flight = []
    most = []

    def respond(number, request):
        in_flight.append(number)
        most.append(len(in_flight))
        time.sleep(0.01)
        in_flight.remove(number)
        return 200, answer(float(request["messages"][0]["content"][2]["text"])), {}

    chances = [round(0.05 * (7 * i % 19 + 1), 2) for i in range(19)]
    with FakeJudge(respond) as judge:
        lasts = [picture(number) for number in (2, 3, 4)]
        asked = [Pair(picture(1), lasts[i % 3], str(chance)) for i, chance in enumerate(chances)]
        verdicts = client(judge, max_concurrency=5).score(asked)
    assert [verdict.p_yes for verdict in verdicts] == pytest.approx(chances)
    assert 1 < max(most) <= 5


def test_questions_with_the_same_last_image_are_sent_together():
    first, second, third, fourth = map(picture, (1, 2, 3, 4))
    several = Pair(second, third, "of three", (fourth,))
    pairs = [Pair(first, second, "a"), Pair(first, fourth, "b"), Pair(first, third, "c")]
    pairs += [Pair(second, fourth, "d"), several, Pair(third, None, "of one")]
    assert asking_order(pairs) == [0, 1, 3, 4, 2, 5]


@pytest.mark.parametrize("fault", [(429, {}, {}), (500, {}, {}), (503, {}, {}), None])
def test_temporary_faults_are_retried(fault):
    with FakeJudge(lambda number, _: fault if number < 3 else (200, answer(0.6), {})) as judge:
        (verdict,) = client(judge).score([PAIR])
    assert verdict.p_yes == pytest.approx(0.6) and len(judge.requests) == 3


@pytest.mark.parametrize(("status", "attempts"), [(404, 1), (500, 3), (502, None)])
def test_an_error_is_not_retried_forever(status, attempts, monkeypatch):
    monkeypatch.setattr(transport, "LONGEST_PAUSE_S", 0.4)
    with FakeJudge(lambda *_: (status, b"no such thing", {})) as judge:
        (verdict,) = client(judge, deadline_s=10 if attempts else 1).score([PAIR])
    assert verdict.p_yes is None and f"HTTP {status}: no such thing" in verdict.error
    assert len(judge.requests) == attempts or "gave up after" in verdict.error


def test_each_written_answer_has_its_own_deadline_and_scores_a_common_one():
    def respond(number, request):
        time.sleep(0.3)
        return 200, answer(0.6), {}

    with FakeJudge(respond) as judge:
        scorer = client(judge, deadline_s=0.8, max_concurrency=1)
        assert scorer.generate([PAIR] * 4, 8) == [Answer("Yes")] * 4
        first, *_, last = scorer.score([PAIR] * 4)
        assert first.ok and "deadline_s" in last.error


WRITTEN = {"choices": [{"message": {"content": "The"}, "logprobs": None}]}


@pytest.mark.parametrize(
    ("writes", "bad", "named", "good"),
    [
        (False, answer(0.8, count=1), "1 of 20", answer(0.5)),
        (False, WRITTEN, "top_logprobs", answer(0.5)),
        (False, fake_judge.first_token(("Yes", 30.0), ("No", 2.0)), "logprobs-mode", answer(0.5)),
        (True, b"<html>", "<html>", WRITTEN),
    ],
)
def test_answers_that_cannot_be_read_fail_the_proof(writes, bad, named, good):
    """Written answers need no Yes."""
    with FakeJudge(lambda *_: (200, bad, {})) as judge:
        with pytest.raises(UserError, match=f"{judge.url}.*{named}"):
            client(judge).prove(PAIR, writes)
        judge.respond = lambda *_: (200, good, {})
        client(judge).prove(PAIR, writes)


def test_two_bad_images_of_a_pair_are_one_reason(tmp_path, caplog):
    """And none that asyncio reports later."""
    for number in (1, 2):
        picture(number).save(tmp_path / "whole.png")
        part = (tmp_path / "whole.png").read_bytes()[:-60]
        (tmp_path / f"{number}.png").write_bytes(part)
    first, second = [Image.open(tmp_path / f"{number}.png") for number in (1, 2)]
    with FakeJudge() as judge:
        (verdict,) = client(judge).score([Pair(first, second, "same?")])
    gc.collect()
    assert verdict.p_yes is None and ".png" in verdict.error
    assert "never retrieved" not in caplog.text


def test_the_form_says_which_tokens_count():
    reply = json.dumps(answer(0.8)).replace('"Yes"', '"yes"').encode()
    p_yes = []
    with FakeJudge(lambda *_: (200, reply, {})) as judge:
        for form in (RequestForm(), RequestForm(answer_tokens="variants")):
            p_yes.append(client(judge, form=form).score([PAIR])[0].p_yes)
    assert p_yes == [None, pytest.approx(0.8)]


def test_the_model_is_looked_up_whatever_its_case(caplog):
    with FakeJudge(models=("Paco-Reward-7B", "OTHER", "other")) as judge:
        assert client(judge, model="PaCo-Reward-7B").score([PAIR])[0].ok
        assert judge.requests[0]["model"] == "Paco-Reward-7B"
        (warning,) = caplog.messages
        assert "'Paco-Reward-7B'" in warning
        assert client(judge, model="other").check() == "other"
        assert len(caplog.messages) == 1
        with pytest.raises(UserError, match="'Paco-Reward-7B', 'OTHER'"):
            client(judge, model="Qwen").check()


def test_the_only_model_of_a_server_needs_no_name(caplog):
    """The published judge is preferred; among others, one must be named."""
    caplog.set_level("INFO")
    with FakeJudge(models=("mine",)) as judge:
        named = JudgeClient(judge.url)
        assert named.score([PAIR])[0].ok and named.check() == judge.requests[0]["model"] == "mine"
        assert "'mine'" in caplog.text
        with pytest.raises(UserError, match="'mine'.*--model.* model="):
            JudgeClient(judge.url, "PaCo-Reward-7B").check()
        judge.models = ["mine", "paco-reward-7b"]
        assert JudgeClient(judge.url).check() == "paco-reward-7b"
        for judge.models in (["mine", "other"], []):
            with pytest.raises(UserError, match="--model"):
                JudgeClient(judge.url).check()


def test_the_api_key_is_sent_and_a_wrong_one_is_reported(monkeypatch):
    with FakeJudge(key="7") as judge:
        with pytest.raises(UserError, match="VLLM_API_KEY"):
            client(judge, api_key="wrong").check()
        client(judge, api_key=7).check()
        monkeypatch.setenv("VLLM_API_KEY", "7\n")
        assert client(judge).score([PAIR])[0].ok
