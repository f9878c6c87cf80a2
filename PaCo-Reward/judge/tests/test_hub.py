"""Missing weights: one message for every cause, after one request."""

import http.server
import threading
import time

import pytest
from huggingface_hub import constants

from paco_judge.hub import MissingWeights, hub_options, missing_weights

REMEDIES = ("hf download", "hf auth login", "local folder", "HF_ENDPOINT", "HF_HOME")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on loopback and an empty cache: ``answers`` by path, ``requests`` that came."""

    class Handler(http.server.BaseHTTPRequestHandler):
        answers, requests = {}, []

        def do_HEAD(self):
            self.requests.append(self.path)
            status, headers = self.answers.get(self.path, (404, {}))
            self.send_response(status)
            for header, value in {"content-length": "2", **headers}.items():
                self.send_header(header, value)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    set_endpoint(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield Handler
    server.shutdown()
    server.server_close()


def set_endpoint(monkeypatch, url):
    """What HF_ENDPOINT does when huggingface_hub is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def cache(folder, name, file):
    """What a download leaves behind."""
    root = folder / "cache" / f"models--{name.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs/main").write_text("abc")
    (root / "snapshots/abc").mkdir(parents=True)
    (root / "snapshots/abc" / file).write_text("{}")


def problem_of(name, **options):
    start = time.monotonic()
    with pytest.raises(MissingWeights) as caught:
        hub_options(name, **options)
    assert time.monotonic() - start < 5
    return str(caught.value)


@pytest.mark.parametrize(
    ("code", "reason"),
    [("GatedRepo", "gated"), ("RepoNotFound", "no such model"), ("EntryNotFound", "has no config")],
)
def test_each_refusal_of_the_hub_is_one_message_with_all_remedies(hub, code, reason):
    status = 403 if code == "GatedRepo" else 404
    hub.answers["/org/judge/resolve/main/config.json"] = (status, {"x-error-code": code})
    message = problem_of("org/judge")
    assert reason in message and all(remedy in message for remedy in REMEDIES)
    assert "https://huggingface.co/org/judge" in message and len(hub.requests) == 1


def test_an_absent_hub_costs_one_attempt_and_cached_weights_do_without(hub, monkeypatch, tmp_path):
    set_endpoint(monkeypatch, "http://127.0.0.1:9")
    message = problem_of("org/judge")
    assert "cannot be reached" in message and all(remedy in message for remedy in REMEDIES)
    cache(tmp_path, "org/judge", "config.json")
    assert hub_options("org/judge") == {"local_files_only": True}
    problem_of("org/judge", file="model_index.json")  # cached is the file that is needed


def test_offline_mode_is_named(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in problem_of("org/judge") and not hub.requests


def test_a_folder_asks_nobody_and_a_wrong_path_is_not_taken_for_a_name(hub, tmp_path):
    assert hub_options(tmp_path) == {"local_files_only": True}
    for name in (tmp_path / "judge", "./judge", "runs/judge/adapter"):
        assert "neither an existing folder nor a name on the hub" in problem_of(name)
    assert not hub.requests


def test_a_served_model_may_be_downloaded(hub):
    headers = {"x-repo-commit": "a" * 40, "etag": '"e"', "x-linked-size": "2"}
    hub.answers["/org/judge/resolve/main/config.json"] = (200, headers)
    assert hub_options("org/judge") == {"local_files_only": False}


def test_the_remedies_are_one_text():
    assert all(remedy in missing_weights("org/judge", "why") for remedy in REMEDIES)
