"""Run the same commands on two versions of the repository and compare everything they write, bit for bit.

    python tools/golden.py --against COMMIT             all cases, minutes
    python tools/golden.py --against COMMIT --quick     a few cases, under two minutes
    python tools/golden.py --against COMMIT --only flux-ppo data

Side A is COMMIT in a temporary git worktree; side B is the present files of this repository (or ``--head COMMIT``).
Both sides are driven through the published commands only, because modules may have moved between them. All cases run
on the CPU with fixed seeds, on inputs that this tool makes once. Third-party packages are imported once; every command
then runs in a forked process that imports the side's own code. Exit status: 0 equal, 1 different, 2 could not run.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
REPO = TOOLS.parent
sys.path.insert(0, str(TOOLS))

from golden_cases import CASES, QUICK, SAME, Command, command, judge_server, write_inputs
from golden_compare import compare_folders

CODE = ("PaCo-GRPO", "PaCo-Reward/judge", "PaCo-Reward/LLaMA-Factory/src", "PaCo-Reward/evaluation", "quickstart")
CACHE = Path(tempfile.gettempdir()) / "paco-golden"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "LLAMAFACTORY_VERBOSITY": "WARN", "NPROC_PER_NODE": "1",
    "PYTHONHASHSEED": "0",
}  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One version of the repository and where its cases write."""

    name: str
    code: Path
    out: Path


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="side A")
    parser.add_argument("--head", metavar="COMMIT", help="side B; default: the present files")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these cases (a prefix is enough)")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--fresh", action="store_true", help="run side A again even if its results are cached")
    parser.add_argument("--keep", action="store_true", help="keep side B's outputs even if they are equal")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time (default 2)")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{name}{'  (quick)' if name in QUICK else ''}" for name in CASES))
        return 0
    if not args.against:
        parser.error("--against COMMIT is needed")
    names = [n for n in CASES if (n in QUICK or not args.quick) and (not args.only or n.startswith(tuple(args.only)))]
    if not names:
        parser.error(f"no case begins with {' or '.join(args.only)}; see --list")
    if os.environ.get("PYTHONHASHSEED") != "0":  # read at start-up only, so start again
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ENVIRONMENT)
    try:
        return run(args, names)
    except subprocess.CalledProcessError as error:
        print(f"error: {' '.join(map(str, error.cmd))}: {error.stderr.strip()}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace, names: list[str]) -> int:
    """Run what is missing on both sides, compare, and report."""
    started = time.monotonic()
    commit = git("rev-parse", "--verify", f"{args.against}^{{commit}}")
    source = b"".join((TOOLS / name).read_bytes() for name in ("golden.py", "golden_cases.py"))
    key = hashlib.sha256(source + f"{commit} {sys.executable} {sys.version}".encode()).hexdigest()[:16]
    CACHE.mkdir(exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="run-", dir=CACHE))
    with contextlib.ExitStack() as stack:
        # Concurrent runs against the same commit wait here, and find its results in the cache.
        lock = stack.enter_context(open(CACHE / f"{key}.lock", "w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        cached = CACHE / key
        if args.fresh:
            shutil.rmtree(cached, ignore_errors=True)
        todo = [name for name in names if not (cached / name).is_dir()]
        have = len(names) - len(todo)
        print(f"side A: {args.against} = {commit[:10]}; {have} of {len(names)} cases cached in {cached}", flush=True)
        inputs = CACHE / f"{key}-inputs"
        judge = stack.enter_context(start_judge())
        preload()
        if not inputs.is_dir():
            write_inputs(work / "inputs", REPO / "quickstart" / "models")
            (work / "inputs").rename(inputs)
        print(f"imports and inputs: {time.monotonic() - started:.0f} s", flush=True)
        failed = []
        if todo:
            side = Side("A", stack.enter_context(worktree(commit, work / "code_a")), work / "a")
            failed += run_cases(side, todo, inputs, judge, args.jobs)
            cached.mkdir(exist_ok=True)
            for name in todo:
                if f"A {name}" not in failed:
                    (side.out / name).rename(cached / name)
        fcntl.flock(lock, fcntl.LOCK_UN)
        head = stack.enter_context(worktree(args.head, work / "code_b")) if args.head else REPO
        side = Side("B", head, work / "b")
        failed += run_cases(side, names, inputs, judge, args.jobs)
        differences = compare_cases(names, failed, cached, side.out)
    for line in differences:
        print(line)
    print(
        f"{len(names)} cases, {len(failed)} failed, {len(differences)} differences, {time.monotonic() - started:.0f} s"
    )
    if differences or failed or args.keep:
        print(f"A: {cached}\nB: {side.out}")
    else:
        shutil.rmtree(work)
    return 1 if differences or failed else 0


def compare_cases(names: list[str], failed: list[str], a: Path, b: Path) -> list[str]:
    """The differences between the sides, and within a side between runs that must end in the same state."""
    differences = []
    for name in names:
        if not {f"A {name}", f"B {name}"} & set(failed):
            differences += [f"{name}/{line}" for line in compare_folders(a / name, b / name)]
    for one, two in SAME:
        for side, out in (("A", a), ("B", b)):
            if (out / one).is_dir() and (out / two).is_dir():
                lines = compare_folders(out / one, out / two)
                differences += [f"side {side}, {one} against {two}: {line}" for line in lines]
    return differences


def git(*arguments: str) -> str:
    """Output of a git command in this repository."""
    command = ["git", "-C", str(REPO), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def worktree(commit: str, folder: Path):
    """The files of ``commit`` in ``folder`` while the context lasts."""
    git("worktree", "add", "--detach", "--force", str(folder), commit)
    try:
        yield folder
    finally:
        git("worktree", "remove", "--force", str(folder))


def preload() -> None:
    """Import the third-party packages that most cases use; they are the same on both sides."""
    import accelerate  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import peft  # noqa: F401
    import torch
    from diffusers import FluxKontextPipeline, FluxPipeline, QwenImageEditPipeline  # noqa: F401
    from transformers import (  # noqa: F401
        AutoProcessor,
        CLIPTextModel,
        Qwen2_5_VLForConditionalGeneration,
        T5EncoderModel,
        Trainer,
    )

    torch.set_num_threads(1)


@contextlib.contextmanager
def start_judge():
    """A judge over HTTP whose answers are computed from the pixels; yields its address."""
    server = judge_server()
    child = os.fork()  # a process, not a thread: the cases are forked from this one
    if child == 0:
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
        os._exit(0)
    server.server_close()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        os.kill(child, 15)
        os.waitpid(child, 0)


def run_cases(side: Side, names: list[str], inputs: Path, judge: str, jobs: int) -> list[str]:
    """Run cases, ``jobs`` at a time, each into ``side.out / name``; returns "SIDE NAME" of those that failed."""
    started, running, failed, waiting = time.monotonic(), {}, [], list(names)
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            running[fork(run_case, side, name, inputs, judge)] = (name, time.monotonic())
        pid, status = os.waitpid(-1, 0)
        if pid in running:
            name, since = running.pop(pid)
            print(f"  {side.name} {name}: {'failed' if status else 'ok'}, {time.monotonic() - since:.1f} s", flush=True)
            if status:
                failed.append(f"{side.name} {name}")
    print(f"side {side.name}: {len(names)} cases, {time.monotonic() - started:.0f} s", flush=True)
    return failed


def run_case(side: Side, name: str, inputs: Path, judge: str) -> None:
    """Run a case's commands one after another, in this process's children."""
    out = side.out / name
    out.mkdir(parents=True)
    for number, text in enumerate(CASES[name]):
        todo, port = command(text, inputs=inputs, out=out, judge=judge), free_port()
        ranks = [fork(run_command, side, todo, out / str(number), inputs, rank, port) for rank in range(todo.processes)]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        if any(statuses) and not (todo.prints and statuses == [1]):
            log = (out / f"{number}.0.err").read_text(errors="replace")
            print(f"{side.name} {name}: {text}\nexit status {statuses}\n{log[-3000:]}", file=sys.stderr)
            os._exit(1)
    normalize(out, {out: "<out>", inputs: "<inputs>", side.code: "<repo>", judge: "<judge>"})


def run_command(side: Side, todo: Command, log: Path, inputs: Path, rank: int = 0, port: int = 0) -> None:
    """Run one published command in this process, as number ``rank`` of ``todo.processes``."""
    for suffix, stream in (("out" if todo.prints else "log", 1), ("err", 2)):
        os.dup2(os.open(f"{log}.{rank}.{suffix}", os.O_WRONLY | os.O_CREAT, 0o644), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = [*(str(side.code / folder) for folder in CODE), str(inputs)]
    elsewhere = (*(f"/{folder}" for folder in CODE), str(TOOLS))  # other trees: installed, or in PYTHONPATH
    sys.path[:] = [*code, *(entry for entry in sys.path if not entry.endswith(elsewhere))]
    os.environ |= {"PYTHONPATH": os.pathsep.join(code), "HF_DATASETS_CACHE": str(log.parent / "cache.log")}
    if todo.processes > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"WORLD_SIZE": str(todo.processes), "LOCAL_WORLD_SIZE": str(todo.processes)}
    os.chdir(side.code / todo.folder)
    if todo.argv[0] == "-m":
        sys.argv = list(todo.argv[1:])
        runpy.run_module(todo.argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(todo.argv)
        sys.path.insert(0, str(Path(todo.argv[0]).resolve().parent))
        runpy.run_path(todo.argv[0], run_name="__main__")


def normalize(out: Path, names: dict) -> None:
    """Replace paths and addresses that differ between the sides in the text files of ``out``."""
    for path in out.rglob("*"):
        if path.suffix in (".json", ".jsonl", ".yaml", ".out", ".txt") and path.is_file():
            text = path.read_text()
            for old, new in names.items():
                text = text.replace(str(old), new)
            path.write_text(text)


def fork(function, *arguments) -> int:
    """Call ``function`` in a child process; returns its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        function(*arguments)
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def free_port() -> int:
    """A TCP port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
