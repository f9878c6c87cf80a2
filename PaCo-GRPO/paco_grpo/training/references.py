"""Whether all reference images of a run can be read.

Their headers are read at the start. The whole images are decoded in threads beside the first epoch,
because 46,000 take minutes, and remembered in the run's folder for when it resumes.
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object

from paco_grpo.data.prompts import StoredImage
from paco_grpo.distributed import ProcessError, Shares, Stopped, main_decides, same_outcome
from paco_grpo.training.stopping import StopTraining
from paco_grpo.types import Item
from paco_judge.errors import UserError
from paco_judge.files import write_atomically

logger = logging.getLogger(__name__)

_THREADS = 4  # of a process; more would slow down the sampling beside them
_MANY = 5000  # images, after which a line says how many headers are read
_POLL_SECONDS = 0.5


class References:
    """The reference images of ``items``, each of which is decoded once before the first update.

    Every process has the same, and decodes its share of them (``Shares``).
    """

    def __init__(self, items: Iterable[Item], folder: Path, accelerator: Accelerator) -> None:
        """``folder``: of the run."""
        self.images = stored_images(items)
        self.folder = folder
        self.accelerator = accelerator
        self.problems: list[str] = []  # that this process has found so far
        self._pending: list[int] = []  # numbers of the images that no process has decoded
        self._decoded: list[Future[str | None]] = []  # → the ``version`` of a good image
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="references")

    @property
    def _memory(self) -> Path:
        return self.folder / "decoded_references.txt"

    def check_headers(self) -> None:
        """Raise a UserError that names the images whose headers cannot be read.

        A collective operation. Images that an earlier start has decoded are left out.
        """
        self._pending = main_decides(self.accelerator, self._check_new)

    def _check_new(self) -> list[int]:
        remembered = set(self._memory.read_text().split()) if self._memory.exists() else set()
        pending = []
        with ThreadPoolExecutor() as threads:
            for number, image_version in enumerate(threads.map(version, self.images)):
                if image_version not in remembered:
                    pending.append(number)
        check_headers([self.images[number] for number in pending])
        return pending

    def start(self) -> None:
        """Begin to decode this process's share."""
        for position in Shares.of(self.accelerator, len(self._pending)).positions:
            image = self.images[self._pending[position]]
            self._decoded.append(self._pool.submit(self._decode, image))

    def _decode(self, image: StoredImage) -> str | None:
        before = version(image)
        try:
            image()
        except UserError as error:
            self.problems.append(str(error))
            return None
        return before

    def finish(self, should_stop: Callable[[], bool]) -> None:
        """Wait until all are decoded, and remember the good ones; a collective operation.

        Raises:
            Stopped: ``should_stop``, asked twice a second, answered True on a process.
            StopTraining: Some cannot be read; the message names all of them.
        """
        if not self._pending:
            return
        if not self._decoded:
            self.start()
        with same_outcome(self.accelerator):
            pending = wait(self._decoded, timeout=_POLL_SECONDS).not_done
            if pending:
                logger.info("%d reference images are still to be decoded", len(pending))
            while pending:
                pending = wait(pending, timeout=_POLL_SECONDS).not_done
                if should_stop():
                    raise Stopped
            versions = [future.result() for future in self._decoded]
        versions = gather_object(versions)
        problems = gather_object(self.problems)
        self._pending = []
        with same_outcome(self.accelerator):
            if self.accelerator.is_main_process:
                self._remember(versions)
                if problems:
                    _forget_prompts(self.folder)
        if problems:
            lines = "\n".join(dict.fromkeys(problems))
            raise StopTraining(f"reference images cannot be read; mend or replace them:\n{lines}")

    def _remember(self, versions: Sequence[str | None]) -> None:
        lines = self._memory.read_text() if self._memory.exists() else ""
        lines += "".join(f"{version}\n" for version in versions if version)
        write_atomically(self._memory, lines)

    @contextlib.contextmanager
    def all_named(self, should_stop: Callable[[], bool]) -> Generator[None]:
        """A UserError that every process raises inside the block first waits for ``finish``.

        If a bad image is its reason, that names the other ones, too.
        """
        try:
            yield
        except UserError as error:
            if isinstance(error, ProcessError) or self.accelerator.num_processes == 1:
                self.finish(should_stop)
            raise

    def failed(self) -> bool:
        """Whether this process has found a bad image so far."""
        return bool(self.problems)

    def close(self) -> None:
        """Drop what has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _forget_prompts(folder: Path) -> None:
    """Let the run in ``folder`` resume with a prompt set whose files have changed."""
    plan = json.loads((folder / "plan.json").read_bytes())
    plan["identities"]["dataset"] = None
    write_atomically(folder / "plan.json", json.dumps(plan, indent=1))


def stored_images(items: Iterable[Item]) -> list[StoredImage]:
    """The images that ``items`` read from files, each once."""
    images = {}
    for item in items:
        for reference in item.references:
            if isinstance(reference, StoredImage):
                images[reference.name] = reference
    return list(images.values())


def check_headers(images: Sequence[StoredImage]) -> None:
    """Raise a UserError that names the images whose headers cannot be read."""

    def problem_of(image: StoredImage) -> str | None:
        try:
            image.check_header()
        except UserError as error:
            return str(error)
        return None

    problems = []
    with ThreadPoolExecutor() as threads:
        for number, problem in enumerate(threads.map(problem_of, images)):
            if number % _MANY == 0 and len(images) > _MANY:
                logger.info("headers of %d of %d reference images are read", number, len(images))
            if problem is not None:
                problems.append(problem)
    if problems:
        raise UserError("\n".join(problems))


def version(image: StoredImage) -> str:
    """A hash of where ``image`` is, and of the size and time of its file."""
    try:
        status = image.file.stat()
    except OSError:  # reading it will say why
        return ""
    words = f"{image.name}\0{status.st_size}\0{status.st_mtime_ns}"
    return hashlib.blake2b(words.encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()
