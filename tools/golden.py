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
import hashlib
import importlib
import os
import runpy
import shutil
import signal
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

from golden_cases import CASES, QUICK, SAME, Command, command, judge_answer, write_inputs
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
    """Run what is missing on both sides, compare, and report; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", required=True, help="side A; its results are cached")
    parser.add_argument("--head", metavar="COMMIT", help="side B; default: the present files")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"only these of {', '.join(CASES)} (or a prefix)")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time (default 2)")
    args = parser.parse_args()
    names = [n for n in CASES if (n in QUICK or not args.quick) and (not args.only or n.startswith(tuple(args.only)))]
    if not names:
        parser.error(f"no case begins with {' or '.join(args.only)}; see --help")
    if os.environ.get("PYTHONHASHSEED") != "0":  # read at start-up only, so start again
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ENVIRONMENT)
    started = time.monotonic()
    commit = git("rev-parse", "--verify", f"{args.against}^{{commit}}")
    source = b"".join((TOOLS / name).read_bytes() for name in ("golden.py", "golden_cases.py"))
    key = hashlib.sha256(source + f"{commit} {sys.executable} {sys.version}".encode()).hexdigest()[:16]
    cached, inputs = CACHE / key, CACHE / f"{key}-inputs"
    cached.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="run-", dir=CACHE))
    todo = [name for name in names if not (cached / name).is_dir()]
    print(f"side A: {commit[:10]}; {len(names) - len(todo)} of {len(names)} cases cached in {cached}", flush=True)
    preload()
    if not inputs.is_dir():
        # The models of the edition's first version: later ones have fewer.
        archive = ["git", "archive", "4845a33", "quickstart/models"]
        packed = subprocess.run(archive, cwd=REPO, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", work], input=packed, check=True)
        write_inputs(work / "inputs", work / "quickstart" / "models")
        (work / "inputs").rename(inputs)
    failed, differences, b = [], [], work / "b"
    with contextlib.ExitStack() as stack:
        judge = stack.enter_context(start_judge())
        if todo:
            side = Side("A", stack.enter_context(worktree(commit, work / "code_a")), work / "a")
            failed += run_cases(side, todo, inputs, judge, args.jobs)
            for name in todo:
                if f"A {name}" not in failed and not (cached / name).is_dir():
                    (side.out / name).rename(cached / name)
        head = stack.enter_context(worktree(args.head, work / "code_b")) if args.head else REPO
        failed += run_cases(Side("B", head, b), names, inputs, judge, args.jobs)
    for name in names:
        if not {f"A {name}", f"B {name}"} & set(failed):
            differences += [f"{name}/{line}" for line in compare_folders(cached / name, b / name)]
    for one, two in SAME:  # runs of one side that must end in the same state
        for side, out in (("A", cached), ("B", b)):
            if (out / one).is_dir() and (out / two).is_dir():
                lines = compare_folders(out / one, out / two)
                differences += [f"side {side}, {one} against {two}: {line}" for line in lines]
    print(*differences, sep="\n")
    took = time.monotonic() - started
    print(f"{len(names)} cases, {len(failed)} failed, {len(differences)} differences, {took:.0f} s")
    if differences or failed:
        print(f"A: {cached}\nB: {b}")
        return 1
    shutil.rmtree(work)
    return 0


def git(*arguments: str) -> str:
    """Output of a git command in this repository; a failure ends the program with status 2."""
    done = subprocess.run(["git", "-C", str(REPO), *arguments], check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(2)
    return done.stdout.strip()


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
    pipelines = ("flux.pipeline_flux", "flux.pipeline_flux_kontext", "qwenimage.pipeline_qwenimage_edit")
    for name in ("accelerate", "matplotlib.pyplot", "peft", "transformers.models.auto", "transformers.trainer"):
        importlib.import_module(name)
    for name in pipelines:
        importlib.import_module(f"diffusers.pipelines.{name}")
    import torch

    torch.set_num_threads(1)


@contextlib.contextmanager
def start_judge():
    """A judge over HTTP whose answers are computed from the pixels; yields its address."""
    reader, writer = os.pipe()

    def serve() -> None:
        sys.path.insert(0, str(REPO / "PaCo-Reward" / "judge" / "tests"))
        from fake_judge import FakeJudge

        answers = FakeJudge(lambda number, request: (200, judge_answer(request), {}), models=("judge",))
        os.write(writer, answers.url.encode())
        signal.pause()

    child = fork(serve)  # a process, not a thread: the cases are forked from this one
    try:
        yield os.read(reader, 1000).decode()
    finally:
        os.kill(child, signal.SIGTERM)
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
