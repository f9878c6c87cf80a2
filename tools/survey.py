"""Measure the structure of the code: import circles, the files between the command and the loss, and sizes.

    python tools/survey.py [--repo PATH] [circles] [trace] [sizes]      default: all three

circles  Modules that import each other, imports inside functions included, those for type checking left out.
trace    A tiny training run up to its first backward: the files whose functions are entered, in order, with the number
         of functions and of calls; and the files on the call stack at that moment.
sizes    Lines of source and of tests, words of Markdown, by top folder.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import torch

TOOLS = Path(__file__).resolve().parent
sys.path.insert(0, str(TOOLS))
from golden import ENVIRONMENT, REPO, Side, fork, run_command
from golden_cases import command, write_inputs

PACKAGES = {
    "paco_grpo": "PaCo-GRPO",
    "vllm_server": "PaCo-GRPO",
    "paco_judge": "PaCo-Reward/judge",
    "paco_reward": "PaCo-Reward/LLaMA-Factory/src",
    "paco_eval": "PaCo-Reward/evaluation",
}
# Pages that a command writes.
GENERATED = ("PaCo-GRPO/benchmarks/results/", "quickstart/study_", "quickstart/seeds.")


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", type=Path, default=REPO, help="a checkout of the repository; default: this one")
    parser.add_argument("what", nargs="*", choices=("circles", "trace", "sizes", []), metavar="circles|trace|sizes")
    args = parser.parse_args()
    what, repo = args.what or ["circles", "sizes", "trace"], args.repo.resolve()
    if "circles" in what:
        circles = find_circles(import_graph(read_modules(repo)))
        print(f"import circles: {len(circles)}, over {sum(map(len, circles))} modules")
        for circle in circles:
            print("  " + ", ".join(circle))
    if "sizes" in what:
        print_sizes(repo)
    if "trace" in what:
        os.environ |= ENVIRONMENT
        with tempfile.TemporaryDirectory(prefix="paco-survey-") as folder:
            write_inputs(Path(folder) / "inputs", REPO / "quickstart" / "models")
            if os.waitpid(fork(trace, repo, Path(folder), os.fdopen(os.dup(1), "w")), 0)[1]:
                print((Path(folder) / "log.0.err").read_text()[-3000:], file=sys.stderr)
    return 0


def read_modules(repo: Path) -> dict[str, tuple[str, bool]]:
    """{module name: (its source, whether it is a package)} of the project's packages."""
    modules = {}
    for package, folder in PACKAGES.items():
        for path in sorted((repo / folder / package).rglob("*.py")):
            parts = path.relative_to(repo / folder).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            modules[".".join(parts[:-1] if is_package else parts)] = (path.read_text(), is_package)
    return modules


def import_graph(modules: dict[str, tuple[str, bool]]) -> dict[str, set[str]]:
    """{module: the modules it names in an import}; parents of an imported module are not counted."""
    graph = {}
    for name, (source, is_package) in modules.items():
        package = name if is_package else name.rpartition(".")[0]
        imported = set(_imports(ast.parse(source), package, modules))
        graph[name] = imported - {name}
    return graph


def _imports(node: ast.AST, package: str, known: Iterable[str]) -> Iterator[str]:
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in known)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        source = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            name = f"{source}.{alias.name}"
            if name in known or source in known:
                yield name if name in known else source
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, package, known)


def find_circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that reach each other, largest first."""
    reach = {name: set(near) for name, near in graph.items()}
    for middle in graph:  # Warshall's algorithm
        for name in graph:
            if middle in reach[name]:
                reach[name] |= reach[middle]
    groups = {tuple(sorted(b for b in reach[a] if a in reach[b])) for a in graph if a in reach[a]}
    return sorted(map(list, groups), key=lambda group: (-len(group), group))


# --- trace ------------------------------------------------------------------------------------------------------------


def trace(repo: Path, work: Path, report: TextIO) -> None:
    """Run in this process up to the first backward; write the files entered and those on the stack to ``report``."""
    calls: Counter = Counter()  # of code objects, in order of first entry

    def is_ours(file: str) -> bool:
        """Whether ``file`` is the repository's, and not of an environment or this tool inside it."""
        return file.startswith(f"{repo}/") and not file.startswith(f"{TOOLS}/") and "/site-packages/" not in file

    def profile(frame, event, argument) -> None:
        # Bodies of modules and classes are not functions.
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED and is_ours(frame.f_code.co_filename):
            calls[frame.f_code] += 1

    def backward(*arguments, **keywords) -> None:
        sys.setprofile(None)
        threading.setprofile(None)
        files = dict.fromkeys(code.co_filename for code in calls)
        print(f"files entered from scripts/train.py to the first backward: {len(files)}", file=report)
        for file in files:
            counts = [count for code, count in calls.items() if code.co_filename == file]
            name = os.path.relpath(file, repo)
            print(f"  {name:<60} {len(counts):>4} functions {sum(counts):>7} calls", file=report)
        frames = [frame.filename for frame in reversed(inspect.stack()) if is_ours(frame.filename)]
        stack = [os.path.relpath(file, repo) for file, _ in itertools.groupby(frames)]
        print(f"files on the stack at the first backward: {len(set(stack))}\n  {' > '.join(stack)}", file=report)
        report.flush()
        os._exit(0)

    torch.Tensor.backward = backward
    todo = command("train flux ppo num_epochs=1", inputs=work / "inputs", out=work / "out")
    # Named by its whole path, so that the file of its functions is known as one of the repository.
    todo = replace(todo, argv=(str(repo / todo.folder / todo.argv[0]), *todo.argv[1:]))
    sys.setprofile(profile)
    threading.setprofile(profile)
    run_command(Side("B", repo, work), todo, work / "log", work / "inputs")


# --- sizes ------------------------------------------------------------------------------------------------------------


def print_sizes(repo: Path) -> None:
    """A table by top folder, and the files in ``training/``."""
    listed = subprocess.run(["git", "-C", str(repo), "ls-files"], check=True, capture_output=True, text=True).stdout
    names = [name for name in listed.splitlines() if (repo / name).is_file()]
    counts: defaultdict[str, Counter] = defaultdict(Counter)
    for name in names:
        if kind := kind_of(name):
            text = (repo / name).read_text()
            for place in (name.split("/")[0] if "/" in name else "(root)", "all"):
                counts[place][kind] += len(text.split()) if kind == "words" else text.count("\n")
    print(f"{'':<12} {'source':>8} {'tests':>8} {'Markdown words':>15}")
    for place in sorted(counts, key=lambda name: (name == "all", name)):
        numbers = counts[place]
        print(f"{place:<12} {numbers['source']:>8} {numbers['tests']:>8} {numbers['words']:>15}")
    training = [repo / n for n in names if n.startswith("PaCo-GRPO/paco_grpo/training/") and n.endswith(".py")]
    lines = sum(path.read_text().count("\n") for path in training)
    print(f"paco_grpo/training: {len(training)} files, {lines} lines")


def kind_of(name: str) -> str | None:
    """``source`` (.py and .sh outside tests), ``tests``, ``words`` (Markdown that no command writes) or None."""
    if name.endswith((".py", ".sh")):
        return "tests" if "tests" in name.split("/")[:-1] or name.endswith("conftest.py") else "source"
    return "words" if name.endswith(".md") and not name.startswith(GENERATED) else None


if __name__ == "__main__":
    sys.exit(main())
