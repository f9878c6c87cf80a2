"""Compare what two commits compute: ``python tools/golden.py BEFORE [AFTER]``.

The commands of golden_runs.yaml run on the files of both commits, on the CPU. What they write must
be equal bit for bit, but for times. Every difference is printed; golden_expected.yaml lists those
that are meant, with the reason.

Results are kept by commit in the cache, so that a commit runs once; delete the folder when you are
done. They depend on the installed packages, too, and those that changed are named: to compare two
versions of a package, run the old commit before you install the new version.

Exit status: 0 equal or as expected, 1 different or failed.
"""

import argparse
import functools
import hashlib
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

REPO = Path(__file__).resolve().parents[1]
PARTS = REPO / "tools" / "golden_parts.py"
# A package -> the folder of a commit that has it.
PACKAGES = {
    "paco_grpo": "PaCo-GRPO",
    "paco_judge": "PaCo-Reward/judge",
    "paco_reward": "PaCo-Reward/LLaMA-Factory/src",
    "paco_toy": "quickstart",
}
# With these, the working tree makes the inputs of both commits.
SOURCES = ("PaCo-GRPO/tests", "PaCo-Reward/judge/tests")
# A resumed run compares the optimizer's state. The others hold paths or times of files.
NOT_COMPARED = re.compile(
    r"\.(lock|log|pt|bin)$|log\.txt$|training_loss\.png$|decoded_references\.txt$"
)
# Keys whose values are never equal: times, and a hash of paths.
UNEQUAL = re.compile(r"(^|[./])time/|(_time|runtime|seconds|per_second|dataset_content)$")
# Read as 0: the port of JUDGE, and how long a report's training took.
CHANGING = re.compile(
    r'(?<=port: )\d+|(?<=port": )\d+|(?<=127\.0\.0\.1:)\d+|[\d.]+ minutes \(.*?\)'
)
FORMAT = 2  # of results; raise it when they are read or written in another way
TIMEOUT = 900  # seconds of a command
SHOWN = 12  # differences of a run

Values = dict[str, str]  # "file: key" -> what is there


def paths_of(root: Path, folders: Iterable[str]) -> str:
    """A PYTHONPATH."""
    return ":".join(str(root / folder) for folder in folders)


def make_inputs(cache: Path) -> Path:
    """The folder that all runs read, with the working tree's tiny pipelines."""
    content = PARTS.read_bytes()
    for source in sorted(REPO.glob("PaCo-GRPO/tests/tiny_*.py")):
        content += source.read_bytes()
    folder = cache / f"inputs-{digest(content)}"
    if not folder.is_dir():
        draft = Path(tempfile.mkdtemp(dir=cache))
        path = paths_of(REPO, [*SOURCES, *PACKAGES.values()])
        env = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        subprocess.run([sys.executable, PARTS, "inputs", draft], env=env, check=True)
        draft.rename(folder)
    return folder


@functools.cache
def content_of(folder: Path) -> str:
    """A hash of all files."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return digest(b"".join(file.read_bytes() for file in files))


def checkout(name: str, cache: Path) -> Path:
    """The files of a commit."""
    command = ["git", "-C", REPO, "rev-parse", "--verify", f"{name}^{{commit}}"]
    commit = subprocess.check_output(command, text=True).strip()
    tree = cache / commit
    if not tree.is_dir():
        draft = Path(tempfile.mkdtemp(dir=cache))
        archive = subprocess.check_output(["git", "-C", REPO, "archive", commit])
        subprocess.run(["tar", "-x", "-C", draft], input=archive, check=True)
        draft.rename(tree)
    return tree


def environment_of(tree: Path) -> dict[str, str]:
    """Of commands: a commit's packages, this interpreter, one thread, no GPU."""
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": paths_of(tree, PACKAGES.values()),
        "PYTHONHASHSEED": "0",  # PEFT writes a set in its order
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
    }


def check_packages(tree: Path) -> None:
    """Refuse to compare other packages than a commit's own."""
    code = "import sys, importlib.util as u; print(*[u.find_spec(m).origin for m in sys.argv[1:]])"
    command = [sys.executable, "-c", code, *PACKAGES]
    places = subprocess.check_output(command, env=environment_of(tree), cwd=tree, text=True)
    for place in places.split():
        if not Path(place).is_relative_to(tree):
            sys.exit(f"golden: Python finds {place} instead of a package in {tree}")


def runs_of(inputs: Path) -> dict[str, list[str]]:
    """Name of a run -> lines of bash."""
    table = yaml.safe_load((REPO / "tools" / "golden_runs.yaml").read_text())
    runs = table["runs"]
    for name, settings in json.loads((inputs / "families.json").read_text()).items():
        runs[f"family-{name}"] = [{"set": table["families"] | settings}]
    lines = {}
    for name, commands in runs.items():
        lines[name] = [line_of(command, table["settings"]) for command in commands]
    return lines


def line_of(command: str | Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The line of bash that a command of golden_runs.yaml stands for."""
    if isinstance(command, str):
        return command
    program = command.get("program", "python scripts/train.py")
    words = [f"cd PaCo-GRPO && {program} --config config/grpo.py:{command.get('name', 'toy_t2is')}"]
    for option, value in (settings | command.get("set", {})).items():
        text = value if isinstance(value, str) else json.dumps(value)
        words.append(shlex.quote(f"--config.{option}={text}"))
    words.append(command.get("arguments", ""))
    return " ".join(words)


def results_of(name: str, lines: list[str], tree: Path, inputs: Path) -> dict[str, Any]:
    """The ``values`` of a run, the ``packages``, and the log if it ``failed``."""
    key = digest(json.dumps([FORMAT, lines, content_of(inputs)]).encode())
    file = inputs.parent / f"results-{tree.name[:12]}-{name}-{key}.json"
    if file.is_file():
        return json.loads(file.read_text())
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"golden-{name}-") as scratch:
        out = Path(scratch) / "out"
        out.mkdir()
        places = {
            "JUDGE": f"python {inputs}/golden_parts.py judge",
            "INPUTS": str(inputs),
            "OUT": str(out),
        }
        failed = run(lines, places, tree)
        names = {str(out): "OUT", str(inputs): "INPUTS", str(tree): "TREE"}
        results = {"values": values_of(out, names), "packages": packages(), "failed": failed}
    took = f"{time.monotonic() - begun:.0f} s"
    print(f"{tree.name[:8]} {name}: {failed or took}", flush=True)
    if not failed:
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(results, indent=0))
        draft.replace(file)
    return results


def run(lines: list[str], places: Mapping[str, str], tree: Path) -> str:
    """Run lines of bash, in which words stand for places. Returns the log's end if one fails."""
    for line in lines:
        whole = line
        for word, place in places.items():
            whole = whole.replace(word, place)
        env = environment_of(tree) | {"HF_DATASETS_CACHE": f"{places['OUT']}/../datasets"}
        options = {"cwd": tree, "env": env, "stdin": subprocess.DEVNULL, "timeout": TIMEOUT}
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(["bash", "-c", whole], check=False, **options)
        if done.returncode:
            return f"{line[:200]} …: status {done.returncode}\n{done.stdout[-2000:]}"
    return ""


def packages() -> Values:
    """Versions of Python and of what is installed, and the processor's instructions."""
    versions = {"python": platform.python_version(), "cpu": torch.backends.cpu.get_cpu_capability()}
    for distribution in distributions():
        versions[distribution.name] = distribution.version
    return versions


def digest(content: bytes) -> str:
    """A short hash."""
    return hashlib.sha256(content).hexdigest()[:16]


def values_of(folder: Path, names: Mapping[str, str]) -> Values:
    """Every value in the files of a folder; ``names`` replace paths in texts."""
    values = {}
    for file in sorted(folder.rglob("*")):
        place = str(file.relative_to(folder))
        if file.is_dir() or NOT_COMPARED.search(place):
            continue
        for key, value in read(file, names):
            if not UNEQUAL.search(key):
                values[f"{place}: {key}"] = value
    return values


def read(file: Path, names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Keys and values of a file."""
    if file.suffix == ".safetensors":
        for name, tensor in load_file(file).items():
            content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            size = tensor.double().abs().mean()
            yield name, f"{list(tensor.shape)} of mean size {size:.9g}, {digest(content)}"
        return
    content = file.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError:
        yield "bytes", digest(content)
        return
    for path, name in names.items():
        text = text.replace(path, name)
    text = CHANGING.sub("0", text)
    if file.suffix in (".json", ".yaml"):
        yield from leaves(yaml.safe_load(text) if file.suffix == ".yaml" else json.loads(text))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if file.suffix == ".jsonl":
            yield from leaves(json.loads(line), f"{number}.")
        else:
            yield str(number), line


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The parts of a nested value, with their places."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from leaves(part, f"{prefix}{name}.")
    else:
        yield prefix.rstrip("."), json.dumps(value, ensure_ascii=False)


def differences(before: Values, after: Values) -> Iterator[tuple[str, str, str]]:
    """Place, old and new value of what differs."""
    for place in sorted(before | after):
        old = before.get(place, "(none)")
        new = after.get(place, "(none)")
        if old != new:
            yield place, old, new


def compare(name: str, before: Values, after: Values, expected: list[dict[str, Any]]) -> bool:
    """Print the differences of a run, and count those in ``expected``. Returns whether all are."""
    unexpected = []
    for place, old, new in differences(before, after):
        patterns = {"run": name, "place": place, "old": old, "new": new}
        for entry in expected:
            if all(fnmatchcase(text, entry.get(key, "*")) for key, text in patterns.items()):
                entry["count"] = entry.get("count", 0) + 1
                break
        else:
            unexpected.append(f"  {place}: {old} -> {new}")
    print(f"{name}: {len(before)} values, {len(unexpected)} unexpected differences")
    for line in unexpected[:SHOWN]:
        print(line)
    return not unexpected


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", metavar="BEFORE", help="a commit")
    parser.add_argument("after", metavar="AFTER", nargs="?", default="HEAD", help="default: HEAD")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="runs, such as 'judge*'")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="runs at a time (default 2)")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "paco-golden")
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all jobs at once

    cache = args.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    inputs = make_inputs(cache)
    runs = {}
    for name, lines in runs_of(inputs).items():
        if fnmatchcase(name, args.only):
            runs[name] = lines
    sides = []
    for commit in (args.before, args.after):
        tree = checkout(commit, cache)
        check_packages(tree)
        with ThreadPoolExecutor(args.jobs) as jobs:
            calls = [jobs.submit(results_of, *item, tree, inputs) for item in runs.items()]
        sides.append([call.result() for call in calls])

    expected = yaml.safe_load((REPO / "tools" / "golden_expected.yaml").read_text()) or []
    is_equal = True
    for name, before, after in zip(runs, *sides, strict=True):
        failed = before["failed"] or after["failed"]
        if failed:
            print(f"{name}: FAILED")
            is_equal = False
        else:
            is_equal &= compare(name, before["values"], after["values"], expected)
    for entry in expected:
        if any(fnmatchcase(name, entry["run"]) for name in runs):
            times = entry.get("count", 0)
            print(f"expected, {times} times: {entry['run']} {entry['place']}: {entry['why']}")
    compare("packages, which are not counted", sides[0][0]["packages"], sides[1][0]["packages"], [])
    print("as expected" if is_equal else "DIFFERENT")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
