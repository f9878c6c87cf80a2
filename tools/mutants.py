"""Plant small faults one at a time, and see whether the tests find them, before and after a change of the code.

    python tools/mutants.py --side base --results mutants.json      the tests of --base against its own code
    python tools/mutants.py --side head --results mutants.json      the tests of HEAD against the same faults
    python tools/mutants.py --list                                  only show which faults are chosen

A mutant flips a comparison, changes an operator or a number, negates a condition, or removes a return value or a
statement. Mutants are identified by the name of their function and the source of the expression, so that the same ones
are found after files moved; the first ``--count`` of a seeded order that exist on both sides are used. Tests that name
the function or belong to the same room run first. The file of results is written after each mutant: a stopped run
continues. A test that also fails without the mutant is left out.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
sys.path.insert(0, str(TOOLS))
from golden import CODE, ENVIRONMENT, fork, preload, worktree

PACKAGES = ("PaCo-GRPO/paco_grpo", "PaCo-Reward/judge/paco_judge")
TESTS = ("PaCo-GRPO/tests", "PaCo-Reward/judge/tests", "PaCo-Reward/tests")
SKIPPED_FILES = ("__main__.py", "__init__.py", "style.py", "figures.py", "page.py", "sheet.py")
SKIPPED_FUNCTIONS = ("__repr__", "__str__")
MESSAGES = {"debug", "info", "warning", "error", "exception", "print", "warn", "say", "log"}
COMPARISONS = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One fault and where it is planted: the bytes from ``start`` to ``end`` of ``file`` become ``new``."""

    file: str
    function: str
    kind: str
    old: str
    new: str
    line: int
    start: int
    end: int

    @property
    def key(self) -> str:
        """What identifies the mutant on both sides."""
        return f"{self.function} | {self.source}"

    @property
    def source(self) -> str:
        """What is changed into what."""
        return f"{self.kind} | {self.old} -> {self.new}"


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="8526f20", help="commit before the change (default %(default)s)")
    parser.add_argument("--side", choices=("base", "head"), default="head")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="+", default=TESTS, help="folders of the repository")
    parser.add_argument("--marks", default="not long and not alone", help="pytest -m (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=5.0, help="CPU time of pytest for one mutant (default 5)")
    parser.add_argument("--related", action="store_true", help="only tests of the same room or that name the function")
    parser.add_argument("--results", type=Path, default=Path("mutants.json"))
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    work = Path(os.environ.get("PACO_MUTANTS_WORK") or tempfile.mkdtemp(prefix="paco-mutants-"))
    if "PACO_MUTANTS_WORK" not in os.environ and not args.list:
        start_in_own_environment(work)
    with worktree(args.base, work / "base") as base, worktree("HEAD", work / "head") as head:
        results = json.loads(args.results.read_text()) if args.results.is_file() else {}
        chosen = choose(base, head, args.count, args.seed, list(results))
        if args.list:
            for mutant, there in chosen:
                print(f"{mutant.file}:{mutant.line} / {there.file}:{there.line}  {mutant.key}")
            return 0
        preload()
        for number, (mutant, there) in enumerate(chosen, start=1):
            done = results.setdefault(mutant.key, {"line": mutant.line})
            if args.side not in done:
                tree, here = (base, mutant) if args.side == "base" else (head, there)
                done[args.side] = try_mutant(tree, here, args)
                args.results.write_text(json.dumps(results, indent=1))
            found = done[args.side]
            place = f"{found['file']}:{found['line']}"
            print(f"{number:>3} {found['result']:<9} {found['seconds']:>4} s  {place}  {found['by']}  {mutant.key}", flush=True)
    chosen_results = {mutant.key: results[mutant.key] for mutant, _ in chosen}
    for side in ("base", "head"):
        counts = Counter(done[side]["result"] for done in chosen_results.values() if side in done)
        shown = ", ".join(f"{count} {result}" for result, count in sorted(counts.items()))
        print(f"{side}: {counts.total()} of {len(chosen)} tried; {shown}")
    for key, done in chosen_results.items():
        if {"base", "head"} <= done.keys() and done["base"]["result"] != done["head"]["result"]:
            print(f"base {done['base']['result']}, head {done['head']['result']}: {key}")
    return 0


# --- which mutants ----------------------------------------------------------------------------------------------------


def choose(base: Path, head: Path, count: int, seed: int, tried: list[str]) -> list[tuple[Mutant, Mutant]]:
    """The first ``count`` mutants of ``base`` that exist in ``head`` too, one a function.

    First those already ``tried``, then a seeded order that takes one of each kind in turn.
    """
    places: dict[str, Mutant] = {}
    sources: defaultdict[str, list[Mutant]] = defaultdict(list)
    for mutant in all_mutants(head):
        places[mutant.key] = mutant
        sources[mutant.source].append(mutant)

    def there(mutant: Mutant) -> Mutant | None:
        """Where the mutant is in ``head``: in the function of its name, else at the only place of a long source."""
        same = sources[mutant.source]
        renamed = same[0] if len(same) == 1 and len(mutant.old) >= 15 else None
        return places.get(mutant.key, renamed)

    here = list(all_mutants(base))
    repeated = Counter(mutant.key for mutant in here)
    here = [mutant for mutant in here if repeated[mutant.key] == 1]
    kinds: defaultdict[str, list[Mutant]] = defaultdict(list)
    for mutant in here:
        kinds[mutant.kind].append(mutant)
    for kind, mutants in kinds.items():
        random.Random(f"{seed} {kind}").shuffle(mutants)
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*(kinds[kind] for kind in sorted(kinds))))
    chosen: dict[tuple[str, str], tuple[Mutant, Mutant]] = {}
    for mutant in [*(mutant for mutant in here if mutant.key in tried), *filter(None, in_turn)]:
        if len(chosen) < count and (place := there(mutant)):
            chosen.setdefault((mutant.file, mutant.function), (mutant, place))
    return list(chosen.values())


def all_mutants(tree: Path) -> Iterator[Mutant]:
    """Every mutant of a tree, in the order of its files."""
    for package in PACKAGES:
        for path in sorted((tree / package).rglob("*.py")):
            if path.name not in SKIPPED_FILES:
                yield from mutants_of(path.read_bytes(), str(path.relative_to(tree)))


def mutants_of(source: bytes, file: str) -> Iterator[Mutant]:
    """Every mutant of one file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and function.name not in SKIPPED_FUNCTIONS:
            for node in _executed(function.body):
                for kind, new in _changes(node):
                    start = starts[node.lineno - 1] + node.col_offset
                    end = starts[node.end_lineno - 1] + node.end_col_offset
                    yield Mutant(file, function.name, kind, ast.unparse(node), new, node.lineno, start, end)


def _executed(nodes: list[ast.AST]) -> Iterator[ast.AST]:
    """Nodes that run and matter: no docstrings, messages, annotations or nested functions (those come by themselves)."""
    skipped = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Raise, ast.Assert, ast.JoinedStr)
    for node in nodes:
        if isinstance(node, skipped) or (isinstance(node, ast.Call) and _called(node) in MESSAGES):
            continue
        yield node
        annotation = getattr(node, "annotation", None)
        yield from _executed([child for child in ast.iter_child_nodes(node) if child is not annotation])


def _called(node: ast.AST | None) -> str:
    """The name of the function that a call calls."""
    function = getattr(node, "func", None)
    return getattr(function, "attr", getattr(function, "id", ""))


def _changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(kind, new source) of the mutations of one node."""
    new = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        new.ops = [COMPARISONS[type(node.ops[0])]()]
        yield "comparison", f"({ast.unparse(new)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not _is_text(node):
        new.op = OPERATORS[type(node.op)]()
        yield "operator", f"({ast.unparse(new)})"
    elif isinstance(node, ast.BoolOp):
        new.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "boolean", f"({ast.unparse(new)})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "boolean", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        yield "constant", repr(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield "return", "return None"
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield from [] if _called(node.value) in MESSAGES else [("removal", "pass")]


def _is_text(node: ast.BinOp) -> bool:
    values = [child.value for child in ast.walk(node) if isinstance(child, ast.Constant)]
    return any(isinstance(value, str) for value in values) or any(isinstance(n, ast.JoinedStr) for n in ast.walk(node))


def plant(tree: Path, mutant: Mutant) -> bytes:
    """Write the mutant into its file; returns the file's bytes as they were."""
    path = tree / mutant.file
    before = path.read_bytes()
    after = before[: mutant.start] + mutant.new.encode() + before[mutant.end :]
    compile(after, str(path), "exec")
    path.write_bytes(after)
    return before


# --- running tests ----------------------------------------------------------------------------------------------------


def start_in_own_environment(work: Path) -> None:
    """Run this script again with an interpreter that has all packages but takes the project's from the worktree.

    Tests start subprocesses with ``sys.executable``; the installed (editable) packages are those of another tree.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(work / "venv")], check=True)
    (site,) = (work / "venv" / "lib").glob("python*/site-packages")
    side = "base" if "base" in sys.argv else "head"
    packages = [entry for entry in sys.path if entry.endswith("site-packages")]
    lines = [*(str(work / side / folder) for folder in CODE), *packages]
    (site / "worktree.pth").write_text("\n".join(lines) + "\n")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | ENVIRONMENT
    environment |= {"PACO_MUTANTS_WORK": str(work), "PYTHONDONTWRITEBYTECODE": "1"}
    python = str(work / "venv" / "bin" / "python")
    os.execve(python, [python, *sys.argv], environment)


def try_mutant(tree: Path, mutant: Mutant, args: argparse.Namespace) -> dict:
    """Run the tests against one mutant until one fails; returns the result and what ran."""
    started = time.monotonic()
    related, rest = tests_for(tree, mutant, args.tests)
    files, left_out = related if args.related else related + rest, []
    before = plant(tree, mutant)
    try:
        while True:
            failed, status = run_tests(tree, files, left_out, args.marks, args.minutes)
            if not failed and status in (None, 0, 5):
                result, by = "timeout" if status is None else "survived", f"{len(files)} files, {args.marks}"
                break
            if not failed:
                log = Path(f"{report_file()}.log").read_text(errors="replace")
                result, by = "killed", f"pytest's exit status {status}: {log[-500:]}"
                break
            (tree / mutant.file).write_bytes(before)
            if not run_tests(tree, [failed], [], args.marks, args.minutes)[0]:
                result, by = "killed", failed
                break
            left_out.append(failed)
            plant(tree, mutant)
    finally:
        (tree / mutant.file).write_bytes(before)
    outcome = {"result": result, "by": by, "seconds": round(time.monotonic() - started), "file": mutant.file}
    return outcome | {"line": mutant.line, "related": related, "failing_anyway": left_out}


def tests_for(tree: Path, mutant: Mutant, folders: list[str]) -> tuple[list[str], list[str]]:
    """(related test files, others): related ones name the function or the module, or belong to the same room."""
    place, module = Path(mutant.file), Path(mutant.file).stem
    ranked = []
    for folder in folders:
        for path in sorted((tree / folder).rglob("test_*.py")):
            text = path.read_text()
            same_room = path.parent.name in place.parts[:-1] or path.parent == tree / place.parent.parent / "tests"
            rank = 4 * (mutant.function not in text) + 2 * (not same_room) + (module not in text + path.stem)
            same_package = str(path.relative_to(tree)).split("/")[0] == mutant.file.split("/")[0]
            ranked.append((rank + 8 * (not same_package), str(path.relative_to(tree))))
    ranked.sort()
    return [name for rank, name in ranked if rank <= 5], [name for rank, name in ranked if rank > 5]


def run_tests(tree: Path, files: list[str], left_out: list[str], marks: str, minutes: float) -> tuple[str, int | None]:
    """Run pytest in a forked process; returns the first test that failed ("" if none) and the exit status.

    The status is None if the time was up: ``minutes`` of CPU time, or six times as long by the clock, so that other work
    on the machine changes no result.
    """
    report_file().write_text("")
    deadline = time.monotonic() + 6 * 60 * minutes
    child = fork(_pytest, tree, files, left_out, marks, round(60 * minutes))
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # servers and the like that its tests left behind
            code = os.waitstatus_to_exitcode(status)
            return report_file().read_text(), None if code == -signal.SIGXCPU else code
        time.sleep(0.2)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return report_file().read_text(), None


def report_file() -> Path:
    """Where the forked pytest names its first failure; its output is in the file of that name with ``.log``."""
    return Path(os.environ["PACO_MUTANTS_WORK"]) / "first_failure.txt"


def _pytest(tree: Path, files: list[str], left_out: list[str], marks: str, seconds: int) -> None:
    import pytest

    first = report_file()

    class First:
        """Writes the name of the first test or module that failed."""

        def pytest_runtest_logreport(self, report) -> None:
            if report.failed and not first.read_text():
                first.write_text(report.nodeid)

        pytest_collectreport = pytest_runtest_logreport

    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, -1))
    output = os.open(f"{first}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    sys.path[:] = [*(str(tree / folder) for folder in CODE), *(entry for entry in sys.path if entry != str(TOOLS))]
    deselected = [word for name in left_out for word in ("--deselect", name)]
    options = f"-c {tree}/pyproject.toml --rootdir {tree} -x -q -p no:cacheprovider -o timeout=0 -m".split()
    raise SystemExit(pytest.main([*options, marks, *deselected, *files], plugins=[First()]))


if __name__ == "__main__":
    sys.exit(main())
