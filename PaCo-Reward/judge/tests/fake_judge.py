"""A small HTTP judge on loopback whose answers and faults are set by the test."""

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def answer(p_yes: float) -> dict:
    top = [
        {"token": "Yes", "logprob": math.log(p_yes), "bytes": None},
        {"token": "No", "logprob": math.log1p(-p_yes), "bytes": None},
    ]
    choice = {"index": 0, "message": {"role": "assistant", "content": "Yes"}, "finish_reason": "length"}
    return {"choices": [choice | {"logprobs": {"content": [top[0] | {"top_logprobs": top}]}}]}


NO_KEY = (401, {"error": {"message": "a valid API key is needed"}}, {})


class Server(ThreadingHTTPServer):
    request_queue_size, daemon_threads = 128, True  # as many connections at once as a client opens


class FakeJudge:
    """``respond(number, request) -> (status, body bytes or dict, headers)``; None closes the connection unanswered."""

    def __init__(
        self,
        respond: Callable | None = None,
        models=("Paco-Reward-7B",),
        delay_s: float = 0.0,
        port: int = 0,
        key: str | None = None,
    ):
        self.respond = respond or (lambda number, request: (200, answer(0.75), {}))
        self.models, self.delay_s, self.key = list(models), delay_s, key
        self.requests: list[dict] = []
        self.headers: list[dict] = []
        self.model_requests = self.in_flight = self.max_in_flight = 0
        self.connections = set()
        self._sockets = []
        self._lock = threading.Lock()
        self._server = Server(("127.0.0.1", port), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        for connection in self._sockets:  # kept-alive connections end too, as when a process ends
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _handler(judge):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self):
                judge._sockets.append(self.request)
                super().setup()

            def log_message(self, *_):
                pass

            def has_key(self) -> bool:
                return judge.key is None or self.headers.get("authorization") == f"Bearer {judge.key}"

            def do_GET(self):
                judge.model_requests += 1
                time.sleep(judge.delay_s)
                models = (200, {"data": [{"id": name} for name in judge.models]}, {})
                self.reply(*(models if self.has_key() else NO_KEY))

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with judge._lock:
                    judge.requests.append(request)
                    judge.headers.append(dict(self.headers))
                    judge.connections.add(self.client_address)
                    number = len(judge.requests)
                    judge.in_flight += 1
                    judge.max_in_flight = max(judge.max_in_flight, judge.in_flight)
                time.sleep(judge.delay_s)
                result = judge.respond(number, request) if self.has_key() else NO_KEY
                with judge._lock:
                    judge.in_flight -= 1
                if result is None:
                    self.close_connection = True
                else:
                    self.reply(*result)

            def reply(self, status, body, headers):
                body = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                for name, value in ({"content-length": str(len(body))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        return Handler
