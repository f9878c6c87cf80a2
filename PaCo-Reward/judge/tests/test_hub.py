"""Missing weights: one message, whichever library asked for them."""

import http.server
import threading

import pytest
from huggingface_hub import constants

from paco_judge.errors import UserError
from paco_judge.scorer import JudgeScorer
from paco_judge.weights import from_pretrained_strict, local_folder


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on loopback that has nothing, and an empty cache. ``code``: why it has nothing."""

    class Handler(http.server.BaseHTTPRequestHandler):
        code = "RepoNotFound"

        def answer(self):
            self.send_response(403 if self.code == "GatedRepo" else 404)
            self.send_header("x-error-code", self.code)
            self.send_header("content-length", "0")
            self.end_headers()

        do_HEAD = do_GET = answer

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


def load_model(name):
    from transformers import AutoModelForImageTextToText

    from_pretrained_strict(AutoModelForImageTextToText, name)


def load_files(name):
    local_folder(name, ("adapter_*",))


LOADERS = [load_model, load_files, JudgeScorer.from_pretrained]


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize(
    ("code", "reason"), [("GatedRepo", "are gated"), ("RepoNotFound", "no such model")]
)
def test_what_the_hub_refuses_is_one_message_with_all_remedies(hub, code, reason, load):
    hub.code = code
    with pytest.raises(UserError, match=reason) as caught:
        load("org/judge")
    assert "hf download org/judge" in str(caught.value)


@pytest.mark.parametrize("load", LOADERS)
def test_a_path_that_is_no_folder_is_not_taken_for_a_name(hub, load):
    with pytest.raises(UserError, match="neither an existing folder nor a name"):
        load("runs/judge/adapter")
