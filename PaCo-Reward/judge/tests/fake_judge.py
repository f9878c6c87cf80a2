"""A small HTTP judge on loopback whose answers and faults are set by the test."""

import base64
import contextlib
import io
import json
import math
import socket
import threading
import zlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from PIL import Image


def written(text: str) -> dict:
    """A server's answer, without probabilities."""
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}


def first_token(*entries: tuple[str, float]) -> dict:
    """An answer whose first token has these alternatives, with their probabilities."""
    top = [{"token": token, "logprob": math.log(share)} for token, share in entries]
    body = written(entries[0][0])
    body["choices"][0]["logprobs"] = {"content": [top[0] | {"top_logprobs": top}]}
    return body


def answer(p_yes: float, count: int = 2) -> dict:
    """``count``: how many log-probabilities there are."""
    return first_token(*[("Yes", p_yes), ("No", 1 - p_yes)][:count])


def request_content(request: dict) -> tuple[list[Image.Image], str]:
    """The images of a request, and its last text, the question."""
    images = []
    *shown, text = request["messages"][0]["content"]
    for part in shown:
        if part["type"] == "image_url":
            content = base64.b64decode(part["image_url"]["url"].partition(",")[2])
            images.append(Image.open(io.BytesIO(content)))
    return images, text["text"]


def by_content(number: int, request: dict) -> tuple:
    """Another answer to each question, in whatever order they come."""
    return 200, answer(0.1 + zlib.crc32(json.dumps(request).encode()) % 800 / 1000), {}


class FakeJudge(ThreadingHTTPServer):
    """``respond(number, request) -> (status, body bytes or dict, headers)``; None closes the connection unanswered."""

    request_queue_size, daemon_threads = 128, True  # as many connections at once as a client opens

    def __init__(
        self,
        respond: Callable | None = None,
        models=("Paco-Reward-7B",),
        port: int = 0,
        key: str | None = None,
    ):
        super().__init__(("127.0.0.1", port), Handler)
        self.respond = respond or (lambda number, request: (200, answer(0.75), {}))
        self.models = list(models)
        # Whose answers it says that it gives; None: it says nothing.
        self.identities: dict[str, str | None] = {name: f"fake/{name}@1" for name in models}
        self.key = key
        self.requests: list[dict] = []
        self.headers: list[dict] = []
        self.sockets: list[socket.socket] = []
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        self.port = self.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()
        for connection in self.sockets:  # kept-alive connections end too, as when a process ends
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FakeJudge

    def setup(self):
        self.server.sockets.append(self.request)
        super().setup()

    def log_message(self, *_):
        pass

    def do_GET(self):
        rows = []
        for name in self.server.models:
            rows.append({"id": name, "identity": self.server.identities.get(name)})
        self.reply(200, {"data": rows}, {})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.requests.append(request)
            self.server.headers.append(dict(self.headers))
            number = len(self.server.requests)
        result = self.server.respond(number, request)
        if result is None:
            self.close_connection = True
        else:
            self.reply(*result)

    def reply(self, status, body, headers):
        if self.server.key and self.headers.get("authorization") != f"Bearer {self.server.key}":
            status, body, headers = 401, {"error": {"message": "a valid API key is needed"}}, {}
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
