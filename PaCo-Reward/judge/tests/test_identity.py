"""Identities: of bytes wherever they lie, of hub models by their snapshot, of servers as told."""

import json
import os
import time

import httpx
import pytest

from paco_judge import identity as module
from paco_judge.identity import UNRECORDED, Match, fingerprint, identity, match, served_identity
from paco_judge.serving import SaysIdentity

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _model(root):
    (root / "scheduler").mkdir(parents=True)
    (root / "scheduler" / "config.json").write_text('{"shift": 3.0}')
    (root / "weights.safetensors").write_bytes(bytes(3 * 2**20))
    (root / "half.bin").write_bytes(bytes(2**20))
    (root / "README.md").write_text("no loader reads it")
    (root / ".lock").write_text("not part of it")
    return root


def test_an_identity_is_of_the_content_not_of_the_place(tmp_path):
    first = _model(tmp_path / "a")
    second = _model(tmp_path / "b")
    (second / ".lock").write_text("another")
    assert fingerprint(first) == fingerprint(second)
    (second / "README.md").write_text("other words")
    assert identity(first) == identity(second)
    assert fingerprint(first) != fingerprint(second), "a data set's files are all its own"
    assert identity(first, second) == f"{identity(first)} + {identity(second)}"
    (second / "half.bin").rename(second / "half.pt")
    assert identity(first) != identity(second)
    alone = second / "half.pt"
    assert identity(alone) == identity(first / "half.bin"), "a file's name does not count"
    assert fingerprint(tmp_path / "missing") is None
    assert identity(first, tmp_path / "missing") is None


def test_an_adapter_is_what_is_loaded_of_its_folder(tmp_path):
    """A training goes on writing there, and reports may lie beside it."""
    files = ("adapter_config.json", "adapter_model.safetensors", "preprocessor_config.json")
    for name in files:
        (tmp_path / name).write_text(name)
    before = identity(tmp_path)
    (tmp_path / "checkpoint-8").mkdir()
    for name in ("accuracy.json", "trainer_state.json", "checkpoint-8/adapter_model.safetensors"):
        (tmp_path / name).write_text(name)
    assert identity(tmp_path) == before
    for name in files:
        (tmp_path / name).write_text(name.upper())
        assert identity(tmp_path) != before
        (tmp_path / name).write_text(name)


@pytest.fixture(params=[2**30, 2**20], ids=["whole", "remembered"])
def cache(request, monkeypatch, tmp_path):
    """Hashes of files of this size are kept."""
    monkeypatch.setattr(module, "_REMEMBERED", request.param)
    monkeypatch.setattr(module, "_SETTLED_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("scheduler/config.json", 11),
        ("half.bin", 2**19),
        ("weights.safetensors", 0),
        ("weights.safetensors", 3 * 2**19 + 5),
    ],
)
def test_an_identity_sees_one_changed_byte(cache, tmp_path, name, at):
    """Also if the time of its last change is put back, as copies and archives do."""
    model = _model(tmp_path / "model")
    before = identity(model)
    file = model / name
    times = file.stat()
    time.sleep(0.02)  # a tick of the file system's clock
    with file.open("r+b") as content:
        content.seek(at)
        content.write(b"9")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert identity(model) != before


def test_gigabytes_are_hashed_once(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_REMEMBERED", 2**20)
    monkeypatch.setattr(module, "_SETTLED_S", 0.01)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hashed = []
    hash_file = module._hash
    monkeypatch.setattr(module, "_hash", lambda file: hashed.append(file.name) or hash_file(file))
    model = _model(tmp_path / "model")
    time.sleep(0.05)
    first = identity(model)
    assert sorted(hashed) == ["config.json", "half.bin", "weights.safetensors"]
    hashed.clear()
    assert identity(model) == first and not hashed
    (model / "scheduler" / "config.json").write_text("{}")
    assert identity(model) != first and hashed == ["config.json"]


def _cached(root, name):
    """A hub model as a download leaves it: links into blobs, and the list of the repository."""
    folder = root / ("models--" + name.replace("/", "--"))
    snapshot = folder / "snapshots" / COMMIT
    (snapshot / "transformer").mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    blob = folder / "blobs" / "b10b"
    blob.write_bytes(b"weights")
    (snapshot / "transformer" / "model.safetensors").symlink_to(blob)
    return snapshot


@pytest.fixture
def hub(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_hub_model_is_its_snapshot(hub):
    snapshot = _cached(hub, "org/a")
    _cached(hub, "org/b")
    assert identity("org/a") == f"org/a@{COMMIT}"
    assert match(identity("org/a"), identity("org/b")) is Match.DIFFERENT
    assert identity("org/absent") is None
    before = identity("org/a")
    file = snapshot / "transformer" / "model.safetensors"
    file.unlink()
    file.write_bytes(b"others!")  # put there by hand
    assert match(before, identity("org/a")) is Match.DIFFERENT
    (snapshot.parents[1] / "refs" / "main").write_text("f" * 40)
    snapshot.rename(snapshot.with_name("f" * 40))
    assert identity("org/a").startswith("org/a@ffff")


def test_a_hub_model_that_was_downloaded_in_part_is_known(hub, monkeypatch):
    """huggingface_hub 1.22 and newer refuse it, where the repository has a file more."""
    import huggingface_hub

    snapshot = _cached(hub, "org/a")

    def incomplete(name, local_files_only):
        error = huggingface_hub.errors.LocalEntryNotFoundError("a file is missing")
        error.snapshot_path = str(snapshot)
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", incomplete)
    assert identity("org/a") == f"org/a@{COMMIT}"


BYTES = ["sha256:" + 64 * digit for digit in "ab"]


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (BYTES[0], BYTES[0], Match.SAME),
        (BYTES[0], BYTES[1], Match.DIFFERENT),
        ("o/a@1", "O/A@1", Match.SAME),
        ("o/a@1", "o/a@2", Match.DIFFERENT),
        ("o/a@", "o/a@1", Match.UNKNOWN),
        ("o/a@", "o/a@", Match.UNKNOWN),
        ("o/a@", "o/b@1", Match.DIFFERENT),
        ("o/a@1", BYTES[0], Match.UNKNOWN),
        (None, None, Match.UNKNOWN),
        (BYTES[0], None, Match.UNKNOWN),
        (f"o/a@1 + {BYTES[0]}", f"o/a@1 + {BYTES[1]}", Match.DIFFERENT),
        (f"o/a@ + {BYTES[0]}", f"o/a@1 + {BYTES[0]}", Match.UNKNOWN),
        ("o/a@1", f"o/a@1 + {BYTES[1]}", Match.DIFFERENT),
        ("sha256:" + 32 * "a", BYTES[0], Match.EARLIER),
        (UNRECORDED, BYTES[0], Match.EARLIER),
        (["sha256:12", None], None, Match.EARLIER),
    ],
)
def test_unknown_identities_equal_nothing(before, now, expected):
    assert match(before, now) is expected


def test_a_server_is_believed_as_far_as_it_says(tmp_path):
    judge = _model(tmp_path / "judge")
    lora = tmp_path / "lora"
    lora.mkdir()
    (lora / "adapter_model.safetensors").write_bytes(b"lora")
    rows = [
        {"id": "told", "root": str(judge), "identity": "o/a@7"},
        {"id": "plain", "root": str(judge), "parent": None},
        {"id": "hub", "root": "o/a"},
        {"id": "lora", "root": str(lora), "parent": "plain"},
        {"id": "orphan", "root": str(lora), "parent": "o/a"},
        {"id": "relative", "root": "judge"},
        {"id": "silent"},
    ]
    told = []
    for url in ("http://127.0.0.1:8000", "http://10.1.2.3:8000"):
        told.append([served_identity(row, rows, url) for row in rows])
    here, elsewhere = told
    assert here == ["o/a@7", identity(judge), "o/a@", identity(judge, lora), *[None] * 3]
    assert elsewhere == ["o/a@7", None, "o/a@", *[None] * 4], "folders of another machine"


async def test_vllm_says_whose_scores_it_gives(tmp_path, monkeypatch):
    """Of the weights at its first listing, which it has loaded then; other answers pass."""
    judge = _model(tmp_path / "judge")
    lora = _model(tmp_path / "lora")
    (lora / "half.bin").unlink()
    rows = [
        {"id": "judge", "root": str(judge), "parent": None},
        {"id": "lora", "root": str(lora), "parent": "judge"},
        {"id": "elsewhere", "root": str(tmp_path / "gone"), "parent": None},
        {"id": "orphan", "root": str(lora), "parent": "o/a"},
    ]

    async def vllm(scope, receive, send):
        body = json.dumps({"data": rows}).encode()
        status = 401 if b"wrong" in scope["query_string"] else 200
        headers = [(b"content-length", str(len(body)).encode()), (b"x-request-id", b"7")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body[:9], "more_body": True})
        await send({"type": "http.response.body", "body": body[9:]})

    expected = [identity(judge), identity(judge, lora), None, None]
    monkeypatch.setattr("sys.argv", ["vllm", "serve", "judge", "--seed", "3"])
    transport = httpx.ASGITransport(SaysIdentity(vllm))
    async with httpx.AsyncClient(transport=transport, base_url="http://judge") as client:
        for weights in (b"first", b"exchanged"):
            answer = await client.get("/v1/models")
            assert [row["identity"] for row in answer.json()["data"]] == expected
            assert answer.headers["x-request-id"] == "7"
            (judge / "half.bin").write_bytes(weights)
        for path in ("/v1/models?wrong", "/v1/chat/completions"):
            assert (await client.get(path)).json() == {"data": rows}
    monkeypatch.setattr("sys.argv", ["vllm", "serve", "judge", "--seed", "3", "-q", "fp8"])
    transport = httpx.ASGITransport(SaysIdentity(vllm))
    async with httpx.AsyncClient(transport=transport, base_url="http://judge") as client:
        first, *_ = (await client.get("/v1/models")).json()["data"]
    assert first["identity"] == f"{identity(judge)} + fp8", "other weights than the folder's"
