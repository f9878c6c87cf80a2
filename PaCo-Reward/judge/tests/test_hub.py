"""Missing weights: one message, whichever library asked for them."""

from functools import partial
from types import SimpleNamespace

import httpx
import pytest
from huggingface_hub import constants, set_client_factory
from huggingface_hub.utils._http import default_client_factory
from transformers import AutoModelForImageTextToText

from paco_judge.errors import UserError
from paco_judge.scorer import JudgeScorer
from paco_judge.weights import from_pretrained_strict, local_folder


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that has nothing, and an empty cache; ``hub.code`` says why it has nothing."""

    hub = SimpleNamespace(code="RepoNotFound")

    def answer(request: httpx.Request) -> httpx.Response:
        status = 403 if hub.code == "GatedRepo" else 404
        return httpx.Response(status, headers={"x-error-code": hub.code})

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    set_client_factory(lambda: httpx.Client(transport=httpx.MockTransport(answer)))
    yield hub
    set_client_factory(default_client_factory)


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
