"""A page: who may ask it, what it answers, and its server."""

import io
from functools import partial
from pathlib import Path

import httpx
import pytest
from PIL import Image
from starlette.testclient import TestClient

from paco_judge.errors import UserError
from paco_judge.pages import PageServer, page_app, person_name

KEY = "a-key-of-22-characters"


class Counting:
    """Counts the answers; serves one picture from memory and one from a file."""

    def __init__(self, folder: Path) -> None:
        self.html = folder / "page.html"
        self.html.write_text("<main>one page</main>")
        Image.new("RGB", (3, 2), "red").save(folder / "red.png")
        encoded = io.BytesIO()
        Image.new("RGB", (5, 4), "blue").save(encoded, "JPEG")
        self.pictures = {"a": folder / "red.png", "b": encoded.getvalue()}
        self.answers: list[int] = []

    def state(self, query):
        return {"sum": sum(self.answers), "name": person_name(query.get("name"))}

    def answer(self, body):
        self.answers.append(body["number"])
        return {"sum": sum(self.answers)}

    def undo(self, body):
        self.answers.pop()
        return {"sum": sum(self.answers)}

    def picture(self, name):
        return self.pictures.get(name)


@pytest.fixture
def page(tmp_path):
    return Counting(tmp_path)


@pytest.fixture
def client(page):
    return TestClient(page_app(page, KEY), base_url="http://127.0.0.1:31500")


def test_the_address_has_the_key_once_and_a_cookie_keeps_it(client):
    assert client.get("/").status_code == 403
    opened = client.get("/", params={"key": KEY})
    assert opened.text == "<main>one page</main>"
    cookie = opened.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert opened.headers["referrer-policy"] == "no-referrer"
    assert client.get("/").status_code == 200
    assert "set-cookie" not in client.get("/").headers


def test_two_pages_on_this_machine_keep_their_keys(client, page):
    """A browser sends cookies to all ports of a host."""
    other = TestClient(page_app(page, "another-key"), base_url="http://127.0.0.1:31501")
    client.get("/", params={"key": KEY})
    other.cookies = client.cookies
    other.get("/", params={"key": "another-key"})
    client.cookies = other.cookies
    assert client.get("/").status_code == other.get("/").status_code == 200


def test_answers_undo_and_pictures(client, page):
    client.get("/", params={"key": KEY})
    assert client.post("/answer", json={"number": 3}).json() == {"sum": 3}
    assert client.post("/answer", json={"number": 4}).json() == {"sum": 7}
    assert client.post("/undo", json={}).json() == {"sum": 3}
    assert client.get("/state", params={"name": "Ada L."}).json() == {"sum": 3, "name": "Ada L."}
    red = client.get("/picture/a")
    assert red.headers["content-type"] == "image/png"
    assert red.content == page.pictures["a"].read_bytes()
    blue = client.get("/picture/b")
    assert blue.headers["content-type"] == "image/jpeg"
    assert Image.open(io.BytesIO(blue.content)).size == (5, 4)
    for other in ("c", "red.png", "..%2Fpage.html", "../page.html"):
        assert client.get(f"/picture/{other}").status_code == 404
    for shared in ("/page.css", "/page.js"):
        assert client.get(shared).status_code == 200
    refused = client.get("/state", params={"name": "../Ada"})
    assert refused.status_code == 422
    assert "../Ada" in refused.json()["error"]
    assert client.post("/answer", content=b"[5]").status_code == 400
    assert page.answers == [3]


@pytest.mark.parametrize(
    "headers",
    [
        {"cookie": ""},
        {"cookie": "paco_00000000=a-key-of-22-characters"},
        {"host": "evil.example:31500"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "["},
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:3000"},  # another server on this machine: same site
        {"origin": "null"},
    ],
)
def test_others_post_nothing(client, page, headers):
    client.get("/", params={"key": KEY})
    assert client.post("/answer", json={"number": 5}, headers=headers).status_code == 403
    assert page.answers == []


def test_a_key_in_the_address_of_a_post_is_no_key(client, page):
    assert client.post("/answer", json={"number": 5}, params={"key": KEY}).status_code == 403
    assert page.answers == []


@pytest.mark.parametrize("host", ["localhost:9", "[::1]:8080", "127.0.0.1"])
def test_a_tunnel_has_another_port_and_programs_send_the_key(client, host):
    headers = {"host": host, "authorization": f"Bearer {KEY}"}
    assert client.post("/answer", json={"number": 6}, headers=headers).json() == {"sum": 6}


def test_a_server_in_this_process(page):
    """Another one follows on its port, also when a browser still has a connection."""
    make_app = partial(page_app, page)
    with httpx.Client(trust_env=False) as browser:
        with PageServer(make_app, port=0) as server:
            address = server.announcement().split()[1]
            assert address.startswith("http://127.0.0.1:")
            assert browser.get(address).status_code == 200
            answered = browser.post(f"{server.url}/answer", json={"number": 8})
            assert answered.json() == {"sum": 8}
            with pytest.raises(UserError, match=str(server.port)):
                PageServer(make_app, port=server.port)
        server.wait()
        with PageServer(make_app, port=server.port):
            assert browser.get(server.url).status_code == 403


@pytest.mark.parametrize(
    "name", ["", "  ", "a/b", "..", ".hidden", "x" * 41, "a\nb", "-", "_", None]
)
def test_names_that_no_file_may_have(name):
    with pytest.raises(UserError):
        person_name(name)


@pytest.mark.parametrize("name", ["Ada", " Ada ", "Łukasz", "王", "ada.lovelace-2", "2nd person"])
def test_names_of_people(name):
    assert person_name(name) == name.strip()
