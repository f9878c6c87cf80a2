"""What a figure was measured on: hardware, versions, commit; and the JSON file that holds it all.

PYTHONPATH=benchmarks python -m measuring.machine      prints the machine's name, the folder of its results
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = 1
_ROOT = Path(__file__).resolve().parents[3]
_PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "numpy", "triton", "bitsandbytes", "deepspeed")


def machine() -> dict[str, Any]:
    """Hardware as this process sees it; memory in GiB."""
    import torch

    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads_per_core": _threads_per_core(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": [round(value, 2) for value in os.getloadavg()],
        "gpus": [],
    }
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        gpu = {"name": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
        found["gpus"].append(gpu | {"multiprocessors": properties.multi_processor_count})
    return found


def machine_name() -> str:
    """A folder name: GPU and number of GPUs, else processor and cores."""
    found = machine()
    if found["gpus"]:
        text = f"{found['gpus'][0]['name']} x{len(found['gpus'])}"
    else:
        text = f"cpu {found['processor']} x{found['cores']}"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def versions() -> dict[str, str]:
    """Of Python, CUDA and the packages that computing depends on; those that are not installed are left out."""
    import torch

    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["cuda"] = torch.version.cuda
    return found


def commit() -> dict[str, Any]:
    """The repository's commit, and whether files differ from it; empty outside of git."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(_ROOT), *arguments], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    try:
        changed = [line for line in git("status", "--porcelain").splitlines() if "benchmarks/results" not in line]
        return {"commit": git("rev-parse", "HEAD"), "changed_files": len(changed)}
    except (OSError, subprocess.CalledProcessError):
        return {}


def report(benchmark: str, settings: Mapping[str, Any], **found: Any) -> dict[str, Any]:
    """What a benchmark writes: where and how it was measured, then ``found``."""
    return {
        "benchmark": benchmark,
        "format": FORMAT,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": machine(),
        "versions": versions(),
        "git": commit(),
        "settings": dict(settings),
        **found,
    }


def write(path: Path, made: Mapping[str, Any]) -> None:
    """Write beside and rename: a run that is cut off leaves no half file behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(made, indent=1, default=str) + "\n")
    partial.replace(path)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return re.sub(r"\((R|TM)\)|CPU|Processor", "", line.partition(":")[2], flags=re.IGNORECASE).strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _threads_per_core() -> int | None:
    """Hyperthreads a core as the system says; a virtual machine may not know."""
    try:
        siblings = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list").read_text()
    except OSError:
        return None
    return sum(
        int(last or first) - int(first) + 1
        for first, _, last in (part.strip().partition("-") for part in siblings.split(","))
    )


if __name__ == "__main__":
    print(machine_name())
