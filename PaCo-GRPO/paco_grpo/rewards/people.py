"""Votes of people: a web page shows a training's images, and their answers are the reward.

Every process sends the page the images of its groups. The queue waits until each has an answer or
is skipped (``ScoreQueue``); then the processes ask for the scores. The page belongs to the main
process. What people answer is in the run's ``votes.jsonl``, a line for each answer:

    {"epoch": 3, "item": 5, "seed": 81, "picture": "60303ae22b998861",
     "answer": "like", "score": 1.0, "time": 1767225600.0}

The last line of an image counts. An ``answer`` of null takes one back. ``picture`` is the start of
the SHA-256 of its PNG file: with other options, a resumed run draws others, and asks about them.
"""

import base64
import hashlib
import io
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from paco_grpo.item import Item
from paco_grpo.rewards.contract import RewardRun
from paco_judge import transport
from paco_judge.errors import UserError
from paco_judge.files import Journal, read_json_lines, write_json_lines

if TYPE_CHECKING:
    from paco_judge.pages import PageServer

logger = logging.getLogger(__name__)

# Answer → score. In a group with a best and a worst image, the others are between.
SCORES = {
    "like": 1.0,
    "dislike": 0.0,
    "best": 1.0,
    "between": 0.5,
    "worst": 0.0,
    "skip": None,
    None: None,
}
FORMS = ("like", "best")
_SEND_S = 60.0  # most time to send a group, or to ask for its scores
Key = tuple[int, int]  # item id and seed of an image


def votes(form: str = "like", port: int = 7871) -> "Votes":
    """The factory of the reward.

    Args:
        form: ``like``: every image is liked or not. ``best``: the best and the worst image of each
            group are chosen.
        port: Of the page, on this machine. 0 chooses a free one.
    """
    return Votes(form, port)


class Votes:
    """What people think of an image: a number in [0, 1], NaN where they skipped it."""

    compares_images = True
    where = ("port",)  # is not part of what a score means

    def __init__(self, form: str, port: int) -> None:
        if form not in FORMS:
            raise ValueError(f"form={form!r} is none of {', '.join(FORMS)}")
        self.form = form
        self.port = int(port)
        self.page: VotePage | None = None  # of the main process
        self._server: PageServer | None = None
        self._url = ""
        self._headers: dict[str, str] = {}

    def begin(self, run: RewardRun) -> None:
        """Open the page on the main process. Raises UserError: It cannot be opened."""
        local = int(os.environ.get("LOCAL_WORLD_SIZE", run.processes))
        if local < run.processes:
            raise UserError(
                "its page can be reached from one machine only, so train with the GPUs of one"
            )
        problem = None
        if run.process == 0:
            try:
                self._open(run)
            except UserError as error:
                problem = str(error)
        server = self._server
        address = (server.url, server.key) if server else None
        address, problem = run.from_main((address, problem))
        if address is None:
            raise UserError(problem)
        self._url, key = address
        self._headers = transport.json_headers(key)

    def _open(self, run: RewardRun) -> None:
        from starlette.requests import Request
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        from paco_judge.pages import PageServer, page_app

        page = VotePage(run.folder, self.form, run.resumes)

        async def receive(request: Request) -> JSONResponse:
            page.receive(await request.json())
            return JSONResponse({})

        async def scores(request: Request) -> JSONResponse:
            return JSONResponse(page.scores(await request.json()))

        routes = [
            Route("/group", receive, methods=["POST"]),
            Route("/scores", scores, methods=["POST"]),
        ]
        try:
            self._server = PageServer(lambda key: page_app(page, key, routes), self.port)
        except UserError as error:
            raise UserError(
                f"the page cannot use port {self.port}, perhaps because another run has it: give "
                "another port"
            ) from error
        self.page = page
        page.address = self._server.url
        logger.info("votes: %s", self._server.announcement().replace("\n", "\nvotes: "))

    def show(
        self,
        images: Sequence[Image.Image],
        items: Sequence[Item],
        seeds: Sequence[int],
        epoch: int,
    ) -> None:
        """Send all images of an item to the page. Raises UserError: It does not answer."""
        item = items[0]
        body = {
            "epoch": epoch,
            "item": item.item_id,
            "prompt": item.prompt,
            "references": [_encode(reference) for reference in item.images],
            "seeds": list(seeds),
            "images": [_encode(image) for image in images],
        }
        self._post("group", body)

    def is_waiting(self) -> bool:
        """Whether an image has no answer; only the main process knows."""
        return self.page is not None and self.page.is_waiting()

    def follow(self, phase: str, done: int, total: int) -> None:
        """Let the page show what the training does."""
        if self.page is not None:
            self.page.follow(phase, done, total)

    def __call__(
        self,
        images: Sequence[Image.Image],
        items: Sequence[Item],
        seeds: Sequence[int],
        epoch: int,
    ) -> np.ndarray:
        """Scores (n,) in [0, 1], NaN = skipped."""
        body = {"epoch": epoch, "item": items[0].item_id, "seeds": list(seeds)}
        return np.array(self._post("scores", body), np.float64)

    def close(self) -> None:
        """Close the page. One that is open in a browser says that the run has ended."""
        if self._server is not None:
            self._server.stop()
        if self.page is not None:
            self.page.close()

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        deadline = time.monotonic() + _SEND_S
        request = transport.post(
            f"{self._url}/{path}", self._headers, json.dumps(body).encode(), deadline
        )
        try:
            return json.loads(transport.run(request))
        except transport.NoAnswer as error:
            raise UserError(f"the page of the votes does not answer: {error}") from error


@dataclass
class Group:
    """The images of an item on the page."""

    prompt: str
    references: list[str]  # opaque names of pictures
    pictures: dict[str, Key] = field(default_factory=dict)  # opaque name → item id, seed


class Change(NamedTuple):
    """The answers to some images before and after somebody answered."""

    before: dict[Key, str | None]
    after: dict[Key, str | None]


class VotePage:
    """The page, and the answers of the current epoch; ``paco_judge.pages.Page`` says more.

    Called from the server's thread and from the training.
    """

    html = Path(__file__).with_name("votes.html")

    def __init__(self, folder: Path, form: str, resumes: bool) -> None:
        self.form = form
        self.address = ""  # for the log, without the key
        self.epoch = 0
        self._file = folder / "votes.jsonl"
        self._lock = threading.RLock()
        self._journal: Journal | None = None
        self._groups: dict[int, Group] = {}  # by item id
        self._files: dict[str, bytes] = {}  # the pictures by their opaque names
        self._answers: dict[Key, str | None] = {}
        self._digests: dict[Key, str] = {}  # of the pictures
        self._rows: dict[Key, dict[str, Any]] = {}  # the epoch's last lines of the file
        self._undo: dict[str, list[Change]] = {}  # by browser tab
        self._is_open = False  # people may answer
        self._result: dict[str, int] = {}  # of the last epoch
        self._phase = ("loading", 0, 0)
        self._phase_began = time.monotonic()
        self._closed_at: float | None = None  # when the last epoch had all answers
        self._pause_s: float | None = None  # from one epoch's last answer to the next one's images
        if not resumes:
            self._set_aside(0, "of an earlier run")

    # --- the training's side ----------------------------------------------------------------------

    def receive(self, body: Mapping[str, Any]) -> None:
        """Show a group, which ``Votes.show`` sends."""
        with self._lock:
            if body["epoch"] != self.epoch:
                self._begin_epoch(body["epoch"])
            references = [self._keep(encoded) for encoded in body["references"]]
            group = Group(body["prompt"], references)
            for seed, encoded in zip(body["seeds"], body["images"], strict=True):
                key = (body["item"], seed)
                name = self._keep(encoded)
                group.pictures[name] = key
                self._digests[key] = hashlib.sha256(self._files[name]).hexdigest()[:16]
                row = self._rows.get(key, {})
                is_same = row.get("picture") == self._digests[key]
                self._answers[key] = row["answer"] if is_same else None
            self._groups[body["item"]] = group
            if self.form == "best" and len(group.pictures) == 1:  # nothing to compare
                self._record(dict.fromkeys(group.pictures.values(), "skip"))

    def _begin_epoch(self, epoch: int) -> None:
        """Forget the last epoch's images; in the first epoch of this process, find its votes.

        A run that was stopped while it waited draws the same images again. Votes of later epochs
        are of weights that are gone.
        """
        if self._journal is None:
            self._set_aside(epoch, f"of epochs after {epoch}, which train again")
            self._journal = Journal(self._file, sync=True)
            self._journal.__enter__()
        if self._closed_at is not None:
            self._pause_s = time.monotonic() - self._closed_at
        self.epoch = epoch
        self._groups = {}
        self._files = {}
        self._undo = {}
        self._answers = {}
        self._digests = {}
        self._rows = {}
        for row in self._journal.rows:
            if row["epoch"] == epoch:
                self._rows[row["item"], row["seed"]] = row
        self._is_open = True

    def _set_aside(self, after: int, which: str) -> None:
        """Move the lines of epochs ``after`` this one to another file."""
        with Journal(self._file) as journal:  # which removes a line that a kill cut off
            rows = journal.rows
        kept = []
        moved = []
        for row in rows:
            (moved if row["epoch"] > after else kept).append(row)
        if not moved:
            return
        aside = self._file.with_name(f"replaced_{self._file.name}")
        before = read_json_lines(aside) if aside.exists() else []
        write_json_lines(aside, [*before, *moved])
        write_json_lines(self._file, kept)
        logger.warning("votes: %d lines %s are now in %s", len(moved), which, aside)

    def is_waiting(self) -> bool:
        """Whether an image has no answer. If none lacks one, the epoch's answers are final."""
        with self._lock:
            if not self._is_open:
                return False
            if self._phase[0] != "voting":
                self.follow("voting", 0, 0)
                logger.info(
                    "votes: epoch %d has %d images on the page, and %d have an answer: %s",
                    self.epoch,
                    *self._counts(),
                    self.address,
                )
            shown, answered = self._counts()
            if answered < shown:
                return True
            self._is_open = False
            self._closed_at = time.monotonic()
            self._result = self._summary()
            logger.info(
                "votes: epoch %(epoch)d has %(votes)d votes, and %(skips)d images were skipped; "
                "%(left_out)d of %(groups)d groups teach nothing, because they have fewer than two "
                "votes, or equal ones",
                self._result,
            )
            return False

    def follow(self, phase: str, done: int, total: int) -> None:
        """What the training does now."""
        with self._lock:
            if phase != self._phase[0]:
                self._phase_began = time.monotonic()
            self._phase = (phase, done, total)

    def scores(self, body: Mapping[str, Any]) -> list[float | None]:
        """Of an item's images by their seeds."""
        with self._lock:
            keys = [(body["item"], seed) for seed in body["seeds"]]
            return [SCORES[self._answers.get(key)] for key in keys]

    def close(self) -> None:
        """Close ``votes.jsonl``."""
        with self._lock:
            self._is_open = False
            if self._journal is not None:
                self._journal.__exit__()

    # --- the browser's side -----------------------------------------------------------------------

    def state(self, query: Mapping[str, str]) -> dict[str, Any]:
        """What the page shows."""
        with self._lock:
            phase, done, total = self._phase
            shown, answered = self._counts()
            groups = []
            for group in self._groups.values() if self._is_open else ():
                pictures = []
                for name, key in group.pictures.items():
                    pictures.append({"name": name, "answer": self._answers[key]})
                shared = {"prompt": group.prompt, "references": group.references}
                groups.append(shared | {"pictures": pictures})
            return {
                "form": self.form,
                "epoch": self.epoch,
                "phase": phase,
                "done": done,
                "total": total,
                "seconds_left": self._seconds_left(),
                "shown": shown,
                "answered": answered,
                "groups": groups,
                "can_undo": bool(self._undo.get(query.get("tab", ""))),
                "last": self._result,
            }

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Keep an answer about a picture: {"picture": …, "answer": "like" | "dislike" | "skip"}.

        With the form ``best``, about a group: {"best": …, "worst": …}, or {"picture": one of the
        group, "answer": "skip"}.
        """
        with self._lock:
            group, key = self._find(body.get("picture", body.get("best")))
            answer = body.get("answer")
            allowed = ("like", "dislike", "skip") if self.form == "like" else ("skip",)
            if self.form == "best" and answer is None:
                best = key
                worst = group.pictures.get(body.get("worst", ""))
                if worst is None or worst == best:
                    raise UserError("the best and the worst are two pictures of one group")
                answers = dict.fromkeys(group.pictures.values(), "between")
                answers |= {best: "best", worst: "worst"}
            elif answer not in allowed:
                raise UserError(f"the answer {answer!r} is none of {', '.join(allowed)}")
            elif self.form == "best":
                answers = dict.fromkeys(group.pictures.values(), answer)
            else:
                answers = {key: answer}
            before = {key: self._answers[key] for key in answers}
            self._undo.setdefault(body.get("tab", ""), []).append(Change(before, answers))
            self._record(answers)
            return self.state(body)

    def undo(self, body: dict[str, Any]) -> dict[str, Any]:
        """Take the last answer of a browser tab back, unless another one has answered since."""
        with self._lock:
            changes = self._undo.get(body.get("tab", ""))
            if self._is_open and changes:
                last = changes.pop()
                if last.after.items() <= self._answers.items():
                    self._record(last.before)
            return self.state(body)

    def picture(self, name: str) -> bytes | None:
        """A picture of the epoch."""
        with self._lock:
            return self._files.get(name)

    def _find(self, name: object) -> tuple[Group, Key]:
        for group in self._groups.values() if self._is_open else ():
            if name in group.pictures:
                return group, group.pictures[str(name)]
        raise UserError("this picture has left the page; the run goes on without the answer")

    def _record(self, answers: Mapping[Key, str | None]) -> None:
        """Write answers to the file, and keep them."""
        if self._journal is None:
            raise UserError("no image has been shown yet")
        now = round(time.time(), 3)
        for key, answer in answers.items():
            item, seed = key
            row = {"epoch": self.epoch, "item": item, "seed": seed, "picture": self._digests[key]}
            row |= {"answer": answer, "score": SCORES[answer], "time": now}
            self._journal.append(row)
            self._rows[key] = row
        self._answers |= answers

    def _keep(self, encoded: str) -> str:
        """Keep a picture; returns its opaque name."""
        name = secrets.token_hex(8)
        self._files[name] = base64.b64decode(encoded)
        return name

    def _counts(self) -> tuple[int, int]:
        """How many images are shown, and how many of them have an answer."""
        shown = 0
        answered = 0
        for group in self._groups.values():
            shown += len(group.pictures)
            answered += sum(self._answers[key] is not None for key in group.pictures.values())
        return shown, answered

    def _summary(self) -> dict[str, int]:
        """Of a finished epoch. Images of different items are one group if each item has one."""
        groups = [list(group.pictures.values()) for group in self._groups.values()]
        if all(len(keys) == 1 for keys in groups):
            groups = [[keys[0] for keys in groups]]
        num_votes = 0
        left_out = 0
        for keys in groups:
            votes_of_group = []
            for key in keys:
                score = SCORES[self._answers[key]]
                if score is not None:
                    votes_of_group.append(score)
            num_votes += len(votes_of_group)
            left_out += len(set(votes_of_group)) < 2
        return {
            "epoch": self.epoch,
            "groups": len(groups),
            "left_out": left_out,
            "votes": num_votes,
            "skips": self._counts()[0] - num_votes,
        }

    def _seconds_left(self) -> float | None:
        """Until the next images, as far as it can be estimated."""
        phase, done, total = self._phase
        now = time.monotonic()
        if phase == "sampling" and 0 < done <= total:
            return (now - self._phase_began) / done * (total - done)
        if self._pause_s is None or self._closed_at is None:
            return None
        return max(0.0, self._pause_s - (now - self._closed_at))


def _encode(image: Image.Image) -> str:
    """A PNG file in base64."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()
