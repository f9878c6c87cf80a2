"""vLLM says whose scores it gives: ``vllm serve … --middleware paco_judge.serving.SaysIdentity``."""

import argparse
import asyncio
import json
import sys
from typing import Any

from paco_judge.identity import identity, joined


class SaysIdentity:
    """ASGI middleware that adds ``identity`` to the models that ``/v1/models`` lists.

    They are found once, at the first request for them: until then nobody has asked a question.
    Weights that vLLM's command line quantizes are others.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--quantization", "-q", dest="quantization")
        self._quantization = parser.parse_known_args(sys.argv[1:])[0].quantization
        self._identities: dict[tuple[str, ...], asyncio.Task[str | None]] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"].rstrip("/") != "/v1/models":
            await self.app(scope, receive, send)
            return
        start: dict[str, Any] = {}
        body = b""

        async def complete(message: dict[str, Any]) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                start = message
                return
            body += message.get("body", b"")
            if message.get("more_body"):
                return
            if start["status"] == 200:
                body = json.dumps(await self._with_identities(json.loads(body))).encode()
            headers = []
            for name, value in start["headers"]:
                headers.append((name, b"%d" % len(body) if name == b"content-length" else value))
            await send(start | {"headers": headers})
            await send({"type": "http.response.body", "body": body})

        await self.app(scope, receive, complete)

    async def _with_identities(self, answer: dict[str, Any]) -> dict[str, Any]:
        roots = {row["id"]: row.get("root") for row in answer["data"]}
        for row in answer["data"]:
            # A LoRA's parent is the model that it changes.
            names = [row["parent"], row["id"]] if row.get("parent") else [row["id"]]
            places = tuple(map(roots.get, names))
            if not all(places):  # a parent may be named otherwise than it is served
                row["identity"] = None
                continue
            if places not in self._identities:
                task = asyncio.create_task(asyncio.to_thread(identity, *places))
                self._identities[places] = task
            # A client that leaves does not end the work.
            weights = await asyncio.shield(self._identities[places])
            if self._quantization:
                weights = joined([weights, self._quantization])
            row["identity"] = weights
        return answer
