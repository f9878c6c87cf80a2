"""The client against servers on loopback, good ones and broken ones."""

import base64
import io
import threading
import time
import zlib

import numpy as np
import pytest
from fakes import fake_judge
from PIL import Image

from paco_judge import client as client_module
from paco_judge import transport
from paco_judge.client import FIRST_ANSWER_S, JudgeClient
from paco_judge.errors import UserError
from paco_judge.grid import index_pairs, split_image
from paco_judge.images import UnreadableImage, as_received, data_url
from paco_judge.questions import Pair, RequestForm, build_messages, theme_question
from paco_judge.verdict import Answer

FakeJudge, answer = fake_judge.FakeJudge, fake_judge.answer


def picture(seed: int, size: int = 16) -> Image.Image:
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    )


def jpeg_url(image: Image.Image) -> str:
    """As the published script sends images: a JPEG of quality 75, Pillow's default."""
    image.save(file := io.BytesIO(), "JPEG", quality=75)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def batch(count: int, question: str) -> list[Pair]:
    first, *others = (
        picture(zlib.crc32(f"{question} {number}".encode()), 8) for number in range(count + 1)
    )
    return [Pair(first, other, question) for other in others]


def client(judge: FakeJudge, **settings) -> JudgeClient:
    return JudgeClient(judge.url, **({"model": judge.models[0], "deadline_s": 20.0} | settings))


@pytest.mark.parametrize("question", ["thème\n\x00\u2028", '{"url": ""}', '\\"url": ""'])
@pytest.mark.parametrize("form", [RequestForm(), RequestForm('"url": "" {n}', "jpeg")])
def test_the_request_follows_the_protocol(question, form):
    """Its JSON is put together around the images' URLs, without escaping them."""
    pair = Pair(picture(1), picture(2), question)
    with FakeJudge() as judge:
        (verdict,) = client(judge, form=form).score([pair])
    assert verdict.p_yes == pytest.approx(0.75)
    url_of = data_url if form.image_format == "png" else jpeg_url
    urls = [url_of(image) for image in pair.images]
    assert judge.requests == [
        {
            "model": "Paco-Reward-7B",
            "messages": build_messages(urls, question, form),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 20,
        }
    ]
    sent = Image.open(io.BytesIO(base64.b64decode(urls[0].partition(",")[2])))
    received = as_received(pair.image_a, form.image_format)
    np.testing.assert_array_equal(np.asarray(received), np.asarray(sent))


def test_an_image_is_encoded_once_and_the_model_looked_up_once(monkeypatch):
    cells = split_image(picture(4, size=64), 2, 2)
    asked = [Pair(cells[i], cells[j], theme_question("a star.")) for i, j in index_pairs(4)]
    encoded = []
    encode = client_module.encode
    monkeypatch.setattr(
        client_module, "encode", lambda *given: encoded.append(given[0]) or encode(*given)
    )
    with FakeJudge(fake_judge.by_content) as judge:
        scorer = client(judge)
        first = scorer.score(asked)
        assert [id(image) for image in encoded] == [id(cell) for cell in cells]
        assert len(judge.requests) == 6 and len({verdict.p_yes for verdict in first}) == 6
        assert scorer.score(asked) == first and judge.model_requests == 1


def test_verdicts_are_in_the_order_of_the_pairs_and_few_requests_in_flight():
    def respond(number, request):
        return 200, answer(float(request["messages"][0]["content"][2]["text"])), {}

    chances = [round(0.05 * (7 * i % 19 + 1), 2) for i in range(19)]
    with FakeJudge(respond, delay_s=0.01) as judge:
        asked = [Pair(picture(9), picture(10), str(chance)) for chance in chances]
        verdicts = client(judge, max_concurrency=5).score(asked)
    assert [verdict.p_yes for verdict in verdicts] == pytest.approx(chances)
    assert 1 < judge.max_in_flight <= 5


@pytest.mark.parametrize("fault", [(429, {}, {}), (500, {}, {}), (503, {}, {}), None])
def test_temporary_faults_are_retried(fault):
    with FakeJudge(
        lambda number, request: fault if number <= 2 else (200, answer(0.6), {})
    ) as judge:
        (verdict,) = client(judge).score(batch(1, f"fault {fault}"))
    assert verdict.p_yes == pytest.approx(0.6) and len(judge.requests) == 3


@pytest.mark.parametrize(("status", "attempts"), [(400, 1), (404, 1), (500, 3)])
def test_an_error_is_not_retried_forever(status, attempts, monkeypatch):
    monkeypatch.setattr(transport, "LONGEST_PAUSE_S", 0.4)
    with FakeJudge(lambda number, request: (status, b"no such thing", {})) as judge:
        (verdict,) = client(judge, deadline_s=10).score(batch(1, f"always {status}"))
    assert verdict.p_yes is None
    assert f"HTTP {status}: no such thing" in verdict.error
    assert len(judge.requests) == attempts


def test_each_written_answer_has_its_own_deadline():
    text = {"choices": [{"message": {"content": "Yes. Both show a fox."}}]}
    with FakeJudge(lambda number, request: (200, text, {}), delay_s=0.4) as judge:
        answers = client(judge, deadline_s=1.0, max_concurrency=1).generate(
            batch(4, "long answers"), 8
        )
    assert answers == [Answer("Yes. Both show a fox.")] * 4


class SilentJudge(FakeJudge):
    """A server that lists its models, accepts questions, and answers none until ``wakes`` is set."""

    def __init__(self):
        self.wakes = threading.Event()
        super().__init__(self.wait)

    def wait(self, number, request):
        self.wakes.wait(30)
        return 200, answer(0.75), {}

    def __exit__(self, *error):
        self.wakes.set()
        super().__exit__(*error)


def test_a_server_that_answers_no_question_fails_the_proof_in_a_stated_time():
    with SilentJudge() as judge:
        silent = client(judge, deadline_s=1.0)
        assert silent.check() == judge.models[0]
        start = time.monotonic()
        with pytest.raises(UserError, match=r"did not score a pair of images within 1 s"):
            silent.prove(*batch(1, "proof"))
        assert time.monotonic() - start < 3
    assert FIRST_ANSWER_S <= 120  # the limit with the default deadline of 600 s


CERTAIN = [{"token": "Yes", "logprob": 0.0}, {"token": "No", "logprob": 0.0}]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"choices": [{"message": {"content": "Yes"}, "logprobs": None}]}, "cannot be read"),
        (b"<html>", "cannot be read"),
        (answer(0.8, count=1), "only 1 of 20"),
        ({"choices": [{"logprobs": {"content": [{"top_logprobs": CERTAIN}]}}]}, "add up to 2"),
    ],
)
def test_a_server_without_log_probabilities_fails_the_proof(body, problem):
    with FakeJudge(lambda number, request: (200, body, {})) as judge:
        with pytest.raises(UserError, match=problem):
            client(judge).prove(*batch(1, "no logprobs"))
        judge.respond = lambda number, request: (200, answer(0.5), {})
        client(judge).prove(*batch(1, "with logprobs"))


def test_unreadable_written_answers_are_errors_and_a_proof_of_them_needs_no_yes():
    pairs = batch(1, "written")
    with FakeJudge(lambda number, request: (200, b'{"choices": [{}]}', {})) as judge:
        (written,) = client(judge).generate(pairs, 8)
        assert "cannot be read" in written.error
        with pytest.raises(UserError, match="cannot be read"):
            client(judge).prove(*pairs, writes=True)
        text = {"choices": [{"message": {"content": "The"}}]}
        judge.respond = lambda number, request: (200, text, {})
        client(judge).prove(*pairs, writes=True)


def test_the_form_says_which_tokens_count():
    reply = answer(0.8)
    for entry in reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        entry["token"] = entry["token"].lower()
    with FakeJudge(lambda number, request: (200, reply, {})) as judge:
        (verdict,) = client(judge).score(batch(1, "neither"))
        assert "neither Yes nor No" in verdict.error
        (verdict,) = client(judge, form=RequestForm(answer_tokens="variants")).score(
            batch(1, "neither")
        )
    assert verdict.p_yes == pytest.approx(0.8)


def test_an_outage_is_waited_for_once_and_not_by_every_call():
    with FakeJudge() as judge:
        scorer = client(judge, deadline_s=2.0)
        scorer.check()
    start = time.monotonic()
    assert not any(verdict.ok for verdict in scorer.score(batch(8, "down 1")))
    assert 1.0 < time.monotonic() - start < 4.0
    time.sleep(max(0.0, 2.1 - (time.monotonic() - start)))
    start = time.monotonic()
    assert not any(verdict.ok for verdict in scorer.score(batch(8, "down 2")))
    assert time.monotonic() - start < 0.5, "the server has been down for longer than the deadline"
    with FakeJudge(port=judge.port):
        assert all(verdict.ok for verdict in scorer.score(batch(8, "down 3"))), "it is back"


def test_the_model_is_looked_up_whatever_its_case(caplog):
    with FakeJudge(models=("Paco-Reward-7B", "other")) as judge:
        assert client(judge, model="PaCo-Reward-7B").score(batch(1, "case"))[0].ok
        assert judge.requests[0]["model"] == "Paco-Reward-7B" and "'Paco-Reward-7B'" in caplog.text
        with pytest.raises(UserError, match="'Paco-Reward-7B', 'other'"):
            client(judge, model="Qwen").check()


def test_the_api_key_is_sent_and_a_wrong_one_is_reported(monkeypatch):
    with FakeJudge(key="right") as judge:
        with pytest.raises(UserError, match="VLLM_API_KEY"):
            client(judge, api_key="wrong").check()
        monkeypatch.setenv("VLLM_API_KEY", "right")
        scorer = client(judge)
        assert scorer.score(batch(1, "key"))[0].ok
        judge.key = "changed"
        (verdict,) = scorer.score(batch(1, "key changed"))
        assert "HTTP 401" in verdict.error and len(judge.requests) == 2, "not retried"


def test_an_unreadable_image_costs_only_its_own_pairs(tmp_path):
    path = tmp_path / "half.png"
    picture(34, size=64).save(path)
    path.write_bytes(path.read_bytes()[:3000])
    broken = Image.open(path)
    with FakeJudge() as judge:
        bad, good = client(judge).score(
            [Pair(broken, picture(35), "q"), Pair(picture(36), picture(37), "q")]
        )
    assert "half.png cannot be read" in bad.error and good.ok
    with pytest.raises(UnreadableImage, match=r"half\.png"):
        data_url(broken)
