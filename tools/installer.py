"""Installs packages into an environment with uv, found or bootstrapped, and explains failures. Standard library only."""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
OLDEST_UV = (0, 8)
PROBE_SECONDS = 12
REPORT_SECONDS = 20
SILENT_SECONDS = 3600  # an installer without output for so long hangs: uv itself gives up on a silent network after 180 s


class SetupError(RuntimeError):
    """Something the user can fix; the text is the whole message."""


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def run(command: list, **options) -> subprocess.CompletedProcess:
    """``subprocess.run`` without a check of the exit status."""
    return subprocess.run([str(x) for x in command], check=False, **options)


def python_tag(version: tuple[int, int] = sys.version_info[:2]) -> str:
    return f"py{version[0]}{version[1]}"


def pins(kind: str, tag: str | None = None) -> Path:
    """The constraint file of an environment: `train` or `vllm`, for this Python."""
    tag = tag or python_tag()
    path = REPO / "constraints" / (f"{tag}.txt" if kind == "train" else f"{kind}-{tag}.txt")
    if not path.is_file():
        raise SetupError(f"{path.relative_to(REPO)} is missing: only Python 3.11 and 3.12 have pins.")
    return path


def read_pins(path: Path) -> dict[str, str]:
    """`{normalized name: version}` of a constraint file."""
    found = {}
    for line in path.read_text().splitlines():
        name, sep, version = line.split("#")[0].strip().partition("==")
        if sep:
            found[re.sub(r"[-_.]+", "-", name.split("[")[0]).lower()] = version.split(";")[0].strip()
    return found


def has_gpu() -> bool:
    """True where NVIDIA's driver answers."""
    try:
        return run(["nvidia-smi", "-L"], capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def registry_settings() -> dict[str, str]:
    """The environment for uv, which also gets the mirror and the certificate that pip is configured for."""
    env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    for ours, theirs in (("PIP_INDEX_URL", "UV_DEFAULT_INDEX"), ("PIP_CERT", "SSL_CERT_FILE")):
        if env.get(ours) and not env.get(theirs):
            env[theirs] = env[ours]
    return {"UV_HTTP_TIMEOUT": "180", "UV_NO_PROGRESS": "0" if sys.stderr.isatty() else "1"} | env


def usable_uv(path: str) -> bool:
    """Whether the uv at ``path`` runs and is recent enough."""
    try:
        answer = run([path, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    version = re.search(r"(\d+)\.(\d+)", answer.stdout)
    return answer.returncode == 0 and bool(version) and tuple(map(int, version.groups())) >= OLDEST_UV


def make_venv(env: Path) -> str:
    """Create ``env`` from the running Python's base and return the path of a uv that can install into it.

    Debian's Python may lack ensurepip (package python3-venv) and refuses installs outside a virtual environment
    (PEP 668): then the environment is created without pip, and the system's pip installs uv *into* it.
    """
    base = getattr(sys, "_base_executable", None) or sys.executable
    uv = next((c for c in (shutil.which("uv") or "uv", str(env / "bin/uv"), str(REPO / ".venv/bin/uv")) if usable_uv(c)), None)
    alive = runs_this_version(env / "bin/python")
    if alive and uv:
        return uv
    if not alive:
        if Path(uv or "").is_relative_to(env):  # about to be removed with the environment
            uv = None
        shutil.rmtree(env, ignore_errors=True)
    if uv:
        run_quiet([uv, "venv", "--quiet", "--python", base, str(env)], "creating the virtual environment")
        return uv
    bootstrap(base, env, alive)
    return str(env / "bin/uv")


def runs_this_version(python: Path) -> bool:
    """Whether an interpreter runs and has the version of this one."""
    code = f"import sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    try:
        return run([python, "-c", code], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def bootstrap(base: str, env: Path, alive: bool = False) -> None:
    """Create ``env`` with the standard library's venv and install the pinned uv into it."""
    wanted = f"uv=={read_pins(pins('train'))['uv']}"
    python = str(env / "bin/python")
    quiet = ["install", "--quiet", "--disable-pip-version-check", wanted]
    if not alive and run([base, "-m", "venv", str(env)], capture_output=True).returncode != 0:
        shutil.rmtree(env, ignore_errors=True)
        run_quiet([base, "-m", "venv", "--without-pip", str(env)], "creating the virtual environment")
    if run([python, "-c", "import pip"], capture_output=True).returncode == 0:
        run_quiet([python, "-m", "pip", *quiet], "installing uv")
    elif run([base, "-c", "import pip"], capture_output=True).returncode == 0:
        run_quiet([base, "-m", "pip", "--python", python, *quiet], "installing uv")
    else:
        raise SetupError(
            f"{base} has neither ensurepip nor pip, so nothing can be installed with it.\n"
            "       Debian, Ubuntu: apt-get install python3-venv. Elsewhere: install uv, or name another PYTHON."
        )


def run_quiet(command: list[str], what: str) -> None:
    try:
        done = run(command, capture_output=True, text=True, env=registry_settings(), timeout=SILENT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise SetupError(hung(what, "")) from error
    if done.returncode != 0:
        raise SetupError(explain(what, done.stdout + done.stderr))


def explain(what: str, output: str) -> str:
    """One message for a failed installation: what went wrong and what to do, with the last lines of the output."""
    tail = "\n".join("       | " + line for line in output.strip().splitlines()[-6:])
    if re.search(r"No space left|os error 28|Disk quota", output):
        remedy = "The disk is full: free some space (the environment takes about 6 GB) and run setup.sh again."
    elif re.search(r"(?i)dns error|error sending request|connection (refused|reset|error)|NewConnectionError|"
                   r"timed? ?out|from versions: none|Could not connect|name resolution|Network is unreachable|offline", output):
        remedy = ("The package registry could not be reached. Check the network; behind a proxy set HTTPS_PROXY, "
                  "to use a mirror set UV_DEFAULT_INDEX. Finished downloads are kept.")
    elif re.search(r"(?i)no solution found|unsatisfiable|No matching distribution|not found in the package registry",
                   output):
        remedy = ("The registry does not have a pinned version for this Python and platform "
                  f"({platform.python_version()}, {platform.machine()}).")
    else:
        remedy = "Output of the installer:"
    return f"{what} failed. {remedy}\n{tail}"


def install(uv: str, env: Path, arguments: list[str], what: str) -> None:
    """Run `uv pip install`: with uv's progress bars on a terminal, with a line every 20 s elsewhere."""
    command = [uv, "pip", "install", "--python", str(env / "bin/python"), *arguments]
    start = time.monotonic()
    if sys.stderr.isatty() and run(command, cwd=REPO, env=registry_settings()).returncode == 0:
        return
    # Not a terminal, or failed there: the second attempt captures the output, to explain the failure.
    with (tempfile.TemporaryFile("w+") as output,
          subprocess.Popen(command, cwd=REPO, env=registry_settings(), stdout=output, stderr=subprocess.STDOUT) as process):
        size, changed = 0, start
        while True:
            try:
                process.wait(timeout=REPORT_SECONDS)
                break
            except subprocess.TimeoutExpired:
                now, before, size = time.monotonic(), size, os.fstat(output.fileno()).st_size
                changed = now if size != before else changed
                if now - changed > SILENT_SECONDS:
                    process.kill()
                    output.seek(0)
                    raise SetupError(hung(what, output.read())) from None
                say(f"  {what}: still running ({now - start:.0f} s)")
        output.seek(0)
        if process.returncode != 0:
            raise SetupError(explain(what, output.read()))


def hung(what: str, output: str) -> str:
    """The message for an installer that was ended."""
    return (f"{what} was ended: no output for {SILENT_SECONDS} s. Check the network and the disk, and run setup.sh again; "
            "finished downloads are kept.\n" + "\n".join(f"       | {line}" for line in output.strip().splitlines()[-6:]))


def torch_backend(uv: str, env: Path) -> list[str]:
    """`--torch-backend` arguments. CPU builds are a quarter of the size, but not reachable from every network."""
    chosen = os.environ.get("PACO_TORCH_BACKEND", "")
    if chosen:
        return [] if chosen == "default" else ["--torch-backend", chosen]
    if has_gpu():
        return []
    torch = f"torch=={read_pins(pins('train'))['torch']}"
    # --reinstall: where torch is already installed, a dry run would otherwise succeed without asking the registry.
    probe = [uv, "pip", "install", "--dry-run", "--reinstall", "--no-deps", "--python", str(env / "bin/python"),
             "--torch-backend", "cpu", torch]
    settings = dict(registry_settings(), UV_HTTP_TIMEOUT="6", UV_HTTP_RETRIES="0")
    try:
        reached = run(probe, capture_output=True, env=settings, timeout=PROBE_SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        reached = False
    return ["--torch-backend", "cpu"] if reached else []
