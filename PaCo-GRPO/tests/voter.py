"""Votes on the page of a run, as a browser does."""

import re
import time
from collections.abc import Callable
from pathlib import Path

import httpx

PATIENCE_S = 60


class Voter:
    """A person at the page whose address is in ``log``."""

    def __init__(self, log: Path) -> None:
        address = wait_for(lambda: re.search(r"(http\S+)/\?key=(\S+)", _text(log)))
        headers = {"authorization": f"Bearer {address[2]}"}
        self.client = httpx.Client(base_url=address[1], headers=headers, trust_env=False)

    def state(self) -> dict:
        return self.client.get("/state").json()

    def pictures(self, epoch: int, count: int) -> list[dict]:
        """All ``count`` pictures of an epoch, once the page has them."""

        def shown():
            state = self.state()
            return state["groups"] if (state["epoch"], state["shown"]) == (epoch, count) else None

        return [picture for group in wait_for(shown) for picture in group["pictures"]]

    def answer(self, **body) -> dict:
        response = self.client.post("/answer", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def vote(self, epoch: int, count: int, pause_s: float = 0, most: int | None = None) -> None:
        """Answer at most ``most`` open questions: like what is rather red, skip some."""
        pictures = self.pictures(epoch, count)
        time.sleep(pause_s)
        for picture in [p for p in pictures if not p["answer"]][:most]:
            name = picture["name"]
            encoded = self.client.get(f"/picture/{name}").content
            answer = ("like", "dislike", "like", "skip", "dislike")[sum(encoded) % 5]
            self.answer(picture=name, answer=answer)


def wait_for(condition: Callable):
    """What ``condition`` returns, once that is true."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.05)
    raise TimeoutError


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""
