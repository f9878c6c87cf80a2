"""Missing weights: one message, whichever library asked for them."""

import http.server
import threading
from functools import partial

import pytest
from huggingface_hub import constants
from transformers import AutoModelForImageTextToText

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


LOADERS = [
    JudgeScorer.from_pretrained,
    partial(from_pretrained_strict, AutoModelForImageTextToText),
    partial(local_folder, patterns=("adapter_*",)),
]


@pytest.mark.parametrize("load", LOADERS)
def test_what_the_hub_refuses_is_one_message_with_all_remedies(hub, load):
    """A path that is no folder is not taken for a name."""
    for hub.code, reason in (("GatedRepo", "are gated"), ("RepoNotFound", "no such model")):
        with pytest.raises(UserError, match=f"{reason}.* `hf download org/judge`"):
            load("org/judge")
    with pytest.raises(UserError, match="neither an existing folder nor a name"):
        load("runs/judge/adapter")
