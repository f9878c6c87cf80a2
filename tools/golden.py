"""Compare what two commits compute: ``python tools/golden.py BEFORE [AFTER]``.

The commands of golden_runs.py run in both commits: trainings with every objective and of every
generator, a resumed one, one of two processes, training of a judge, data sets, tables, options.
What they write must be equal bit for bit, times aside. Each difference is printed; one that
golden_expected.yaml has with its reason is no failure. Exit status: 0 equal or as expected,
1 different, 2 not compared.

Results are kept by commit in the cache, so a commit runs once. They depend on the processor and on
the installed packages, which are compared too: when a version is raised, run the commit before it
in the old environment first (docs: CONTRIBUTING.md).
"""

import argparse
import fnmatch
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import golden_runs
import torch
import yaml
from safetensors.torch import load_file

REPO = Path(__file__).resolve().parents[1]
# Where a commit has its packages, and the packages.
PACKAGES = {
    "paco_grpo": "PaCo-GRPO",
    "paco_judge": "PaCo-Reward/judge",
    "paco_reward": "PaCo-Reward/LLaMA-Factory/src",
    "paco_toy": "quickstart",
}
TESTS = REPO / "PaCo-GRPO" / "tests"  # the tiny pipelines
IGNORED = re.compile(r"tfevents|\.lock$|\.log$|training_args\.bin$|/cache/")
TIMES = re.compile(r"(^|[./])time/|(train_time|runtime|seconds|per_second|total_flos)$")
LONGEST = 900  # seconds of a command
SHOWN = 12  # differences of a run
RUNNING: set[subprocess.Popen] = set()  # commands, each with a process group of its own

Values = dict[str, str]  # "file: key" -> what is there


class GoldenError(Exception):
    """What stops the comparison."""


# -- a commit's results


def git(*arguments: str) -> str:
    """What git prints in this repository."""
    done = subprocess.run(
        ["git", "-C", str(REPO), *arguments], check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise GoldenError(done.stderr.strip())
    return done.stdout.strip()


def digest(*contents: bytes) -> str:
    """A short hash."""
    whole = hashlib.sha256()
    for content in contents:
        whole.update(content)
    return whole.hexdigest()[:16]


def make_once(folder: Path, write: Any) -> Path:
    """A folder that ``write(folder)`` makes as a whole, also if two programs make it at once."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=folder.parent))
        write(draft)
        try:
            draft.rename(folder)
        except OSError:  # another program was faster
            shutil.rmtree(draft)
    return folder


def write_tree(commit: str, folder: Path) -> None:
    """The files of a commit."""
    archive = subprocess.Popen(["git", "-C", str(REPO), "archive", commit], stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", str(folder)], stdin=archive.stdout, check=True)
    if archive.wait():
        raise GoldenError(f"git archive {commit} failed")


def environment(tree: Path, scratch: Path) -> dict[str, str]:
    """Of commands that run a commit's packages, on the CPU with one thread each."""
    folders = [tree / folder for folder in PACKAGES.values()]
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": ":".join(map(str, folders)),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(scratch / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
    }


def check_packages(tree: Path) -> None:
    """Refuse a tree whose packages are not the ones that its commands would import."""
    code = "import importlib.util as u, sys; print(*[u.find_spec(m).origin for m in sys.argv[1:]])"
    command = [sys.executable, "-c", code, *PACKAGES]
    options = {"env": environment(tree, tree), "cwd": tree, "text": True}
    done = subprocess.run(command, check=False, capture_output=True, **options)
    places = done.stdout.split()
    others = [place for place in places if not Path(place).is_relative_to(tree)]
    if done.returncode or others:
        raise GoldenError(f"{tree} is not what is imported: {others or done.stderr}")


class Runner:
    """Runs commands of a commit, or takes their results from the cache."""

    def __init__(self, cache: Path, inputs: Path, commit: str) -> None:
        self.cache = cache
        self.inputs = inputs
        self.commit = commit
        self.tree = make_once(cache / "trees" / commit, lambda folder: write_tree(commit, folder))
        check_packages(self.tree)

    def results(self, name: str, commands: list[str]) -> dict[str, Any]:
        """Of a run: ``values``, ``environment``, and whether it ``failed``."""
        key = digest(json.dumps(commands).encode(), self.inputs.name.encode())
        file = self.cache / "results" / self.commit[:12] / f"{name}-{key}.json"
        if file.is_file():
            return json.loads(file.read_text())
        begun = time.monotonic()
        scratch = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.cache))
        out = scratch / "out"
        out.mkdir()
        failed = self._run(commands, scratch, out)
        names = {str(out): "OUT", str(self.inputs): "INPUTS", str(self.tree): "TREE"}
        results = {
            "values": values_of(out, names),
            "environment": packages() | {"machine": platform.processor() or platform.machine()},
            "failed": failed,
        }
        shutil.rmtree(scratch)
        took = time.monotonic() - begun
        print(f"{self.commit[:8]} {name}: {took:.0f} s{' FAILED' if failed else ''}", flush=True)
        if not failed:
            file.parent.mkdir(parents=True, exist_ok=True)
            draft = file.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(results, indent=1))
            draft.replace(file)
        return results

    def _run(self, commands: list[str], scratch: Path, out: Path) -> str:
        """Run commands; returns the end of the log if one fails, else nothing."""
        log = scratch / "log"
        for command in commands:
            line = command.replace("OUT", str(out)).replace("INPUTS", str(self.inputs))
            with log.open("w") as written:
                process = subprocess.Popen(
                    ["bash", "-c", line],
                    cwd=self.tree,
                    env=environment(self.tree, scratch),
                    stdin=subprocess.DEVNULL,
                    stdout=written,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                RUNNING.add(process)
                try:
                    status = process.wait(LONGEST)
                finally:
                    end_group(process)
            if status:
                return f"{command[:200]} …\n{log.read_text()[-1500:]}"
        return ""


def end_group(process: subprocess.Popen) -> None:
    """End what a command left running."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    RUNNING.discard(process)


def end_all(number: int, _: Any) -> None:
    """End the commands that run, then this program: a signal's handler."""
    for process in list(RUNNING):
        end_group(process)
    os._exit(128 + number)


def packages() -> dict[str, str]:
    """Python and what is installed, with versions."""
    versions = {found.name.lower(): found.version for found in distributions()}
    return {"python": platform.python_version()} | dict(sorted(versions.items()))


# -- what files say


def values_of(folder: Path, names: Mapping[str, str]) -> Values:
    """Every value in every file of a folder; ``names`` replace paths in texts."""
    values = {}
    for file in sorted(folder.rglob("*")):
        place = str(file.relative_to(folder))
        if file.is_symlink():
            values[place] = f"-> {os.readlink(file)}"
        elif file.is_file() and not IGNORED.search(str(file)):
            for key, value in read(file, names):
                if not TIMES.search(key):
                    values[f"{place}: {key}" if key else place] = value
    return values


def read(file: Path, names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Keys and values of a file; of an image or an unknown one, a hash under no key."""
    if file.suffix == ".safetensors":
        yield from leaves(load_file(file))
        return
    if file.suffix == ".pt":
        yield from leaves(torch.load(file, weights_only=True))
        return
    content = file.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError:
        yield "", digest(content)
        return
    for path, name in names.items():
        text = text.replace(path, name)
    if file.suffix == ".json":
        yield from leaves(json.loads(text))
    elif file.suffix == ".jsonl":
        for number, line in enumerate(text.splitlines()):
            yield from leaves(json.loads(line), str(number))
    elif file.suffix == ".yaml":
        yield from leaves(yaml.safe_load(text))
    else:
        for number, line in enumerate(text.splitlines(), 1):
            yield f"line {number}", line


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The parts of a nested value with their places."""
    if isinstance(value, Mapping) and value:
        for name, part in value.items():
            yield from leaves(part, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list) and value:
        for number, part in enumerate(value):
            yield from leaves(part, f"{key}.{number}".lstrip("."))
    elif isinstance(value, torch.Tensor):
        content = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        size = value.double().abs().mean()
        yield key, f"{value.dtype} {list(value.shape)} mean |x| {size:.6g} {digest(content)}"
    else:
        yield key, json.dumps(value, ensure_ascii=False)


# -- the comparison


def differences(before: Values, after: Values) -> list[tuple[str, str, str]]:
    """Place, old and new value of what differs."""
    found = []
    for place in sorted(before | after):
        old = before.get(place, "(none)")
        new = after.get(place, "(none)")
        if old != new:
            found.append((place, old, new))
    return found


def is_expected(entry: Mapping[str, str], run: str, place: str, old: str, new: str) -> bool:
    """Whether an entry of golden_expected.yaml is about a difference."""
    return (
        fnmatch.fnmatchcase(run, entry["run"])
        and fnmatch.fnmatchcase(place, entry["place"])
        and fnmatch.fnmatchcase(old, str(entry.get("old", "*")))
        and fnmatch.fnmatchcase(new, str(entry.get("new", "*")))
    )


def compare(run: str, before: Values, after: Values, expected: list[dict]) -> bool:
    """Print the differences of a run; returns whether all are expected, and counts those."""
    unexpected = []
    reasons: dict[str, int] = {}
    for place, old, new in differences(before, after):
        entry = next((e for e in expected if is_expected(e, run, place, old, new)), None)
        if entry is None:
            unexpected.append(f"  {place}: {old} -> {new}")
        else:
            entry["count"] = entry.get("count", 0) + 1
            reasons[entry["why"]] = reasons.get(entry["why"], 0) + 1
    state = "DIFFERENT" if unexpected else "as expected" if reasons else "equal"
    print(f"{run}: {state}, {len(before)} values, {len(unexpected)} unexpected differences")
    for reason, count in reasons.items():
        print(f"  expected ({count}): {reason}")
    print("\n".join(unexpected[:SHOWN]), end="\n" if unexpected else "")
    if len(unexpected) > SHOWN:
        print(f"  and {len(unexpected) - SHOWN} more")
    return not unexpected


def make_inputs(cache: Path) -> Path:
    """The folder that all runs read. Its name says what is in it."""
    sources = [TESTS / "tiny_policies.py", TESTS / "tiny_pipelines.py", TESTS / "tiny_run.py"]
    sources += [Path(golden_runs.__file__), Path(__file__).with_name("golden_rewards.py")]
    key = digest(*[source.read_bytes() for source in sources])

    def write(folder: Path) -> None:
        paths = [str(TESTS), *[str(REPO / place) for place in PACKAGES.values()]]
        command = [sys.executable, golden_runs.__file__, str(folder)]
        env = os.environ | {"PYTHONPATH": ":".join(paths), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, check=False, env=env, capture_output=True, text=True)
        if done.returncode:
            raise GoldenError(f"the inputs could not be made: {done.stderr[-2000:]}")

    return make_once(cache / f"inputs-{key}", write)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", help="a commit")
    parser.add_argument("after", nargs="?", default="HEAD", help="a commit (default: HEAD)")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="runs, such as objective-*")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="runs at once (default 2)")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "paco-golden")
    parser.add_argument(
        "--expected", type=Path, default=Path(__file__).with_name("golden_expected.yaml")
    )
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    args = parse(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_all)
    cache = args.cache.resolve()
    try:
        commits = [git("rev-parse", f"{name}^{{commit}}") for name in (args.before, args.after)]
        inputs = make_inputs(cache)
        before, after = [Runner(cache, inputs, commit) for commit in commits]
    except GoldenError as error:
        print(f"golden: {error}", file=sys.stderr)
        return 2
    runs = golden_runs.all_runs(inputs)
    chosen = {name: runs[name] for name in runs if fnmatch.fnmatchcase(name, args.only)}
    expected = yaml.safe_load(args.expected.read_text()) or []

    with ThreadPoolExecutor(args.jobs) as jobs:
        results = []
        for runner in (before, after):
            results.append(list(jobs.map(runner.results, chosen, chosen.values())))

    is_equal = True
    for name, old, new in zip(chosen, *results, strict=True):
        for side, result in (("before", old), ("after", new)):
            if result["failed"]:
                print(f"{name}: FAILED {side}\n{result['failed']}")
                is_equal = False
        if not (old["failed"] or new["failed"]):
            is_equal &= compare(name, old["values"], new["values"], expected)
    for entry in expected:
        if not entry.get("count") and fnmatch.filter(chosen, entry["run"]):
            print(f"expected, and did not occur: {entry}")
    for line in environment_changes(results):
        print(f"the environment differs: {line}")
    print("equal, but for what is expected" if is_equal else "DIFFERENT")
    return 0 if is_equal else 1


def environment_changes(results: list[list[dict]]) -> list[str]:
    """Packages whose versions differ between the two commits' runs."""
    lines: dict[str, None] = {}
    for old, new in zip(*results, strict=True):
        for place, before, after in differences(old["environment"], new["environment"]):
            lines[f"{place} {before} -> {after}"] = None
    return list(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
