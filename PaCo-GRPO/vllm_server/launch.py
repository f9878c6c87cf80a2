"""Start judge servers and wait until they answer.

With one model, the engine itself answers on VLLM_PORT. With several models, replicas that vLLM does not run itself, an
API key, or VLLM_GATEWAY=always, engines get private loopback ports and a gateway answers on VLLM_PORT.

What and where:
  VLLM_MODEL_PATHS, VLLM_MODEL_NAMES  folders or hub names, comma-separated; names default to the folders'
  VLLM_LORA             name=path, comma-separated: adapters served on their base without merging
  VLLM_HOST, VLLM_PORT  127.0.0.1, 8000
  VLLM_LABEL            default; several launches need different labels and ports
  VLLM_API_KEY          then needed on every route except /health
Engines (VLLM_TP, VLLM_REPLICAS and VLLM_START_TIMEOUT: one value, or one per model):
  VLLM_ENGINE           auto | vllm | transformers
  VLLM_PYTHON           interpreter with vLLM; default: the activated environment's, that of `vllm` on the PATH, .venv-vllm
  VLLM_TP               GPUs that share one copy of a model; default: as few as it fits on
  VLLM_REPLICAS         copies of each model; 1 where VLLM_TP is set, else as many as its GPUs hold
  GPU_MEMORY_UTILIZATION, MAX_MODEL_LEN, CUDA_VISIBLE_DEVICES   0.85, 8192, all (empty: the CPU)
  VLLM_MAX_IMAGES       16; images in one request
  VLLM_MEDIA_HOSTS      none; hosts from which vLLM may fetch images
  VLLM_EXTRA_ARGS       more arguments for the engine
  VLLM_START_TIMEOUT    1800 seconds
Gateway:
  VLLM_GATEWAY          auto | always
  VLLM_GATEWAY_WORKERS, VLLM_MAX_CONCURRENT, VLLM_MAX_BODY_MB, VLLM_REQUEST_TIMEOUT   1, 1024, 32, 600 seconds
PACO_RUNTIME_DIR: folder of state and logs.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace

from vllm_server.engines import check_weights
from vllm_server.plan import LaunchPlan, PlannedProcess, make_plan
from vllm_server.processes import end_processes, exit_status, session_members
from vllm_server.servers import start, wait_until_ready
from vllm_server.settings import LaunchError, LaunchSettings
from vllm_server.state import Group, LabelFolder, end_servers, port_locked, runtime_root

_POLL_S = 0.25


class Interrupted(Exception):
    """A signal asked the launch to end."""


class Interrupts:
    """Raises ``Interrupted`` on SIGINT, SIGTERM and SIGHUP; ``hold`` postpones it where a process could be left behind."""

    def __init__(self):
        self._holding, self._received = False, None

    def install(self) -> None:
        """Handles the signals from here on."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle)

    def hold(self) -> None:
        """Postpones signals until ``release``."""
        self._holding = True

    def release(self) -> None:
        """Ends ``hold``; a signal that arrived in between is raised now."""
        self._holding = False
        if self._received:
            raise Interrupted(self._received)

    def _handle(self, number: int, frame: object) -> None:
        self._received = signal.Signals(number).name
        if not self._holding:
            raise Interrupted(self._received)


def launch(environment: Mapping[str, str], foreground: bool, interrupts: Interrupts) -> int:
    """Starts the servers and waits until they answer; in the foreground also until they end. Returns an exit status."""
    settings = LaunchSettings.from_environment(environment)
    root = runtime_root(environment)
    folder = LabelFolder(root, settings.label)
    with folder.locked(), port_locked(root, settings.port, settings.label):
        group = folder.read()
        for server in group.servers if group else ():
            if server.leader.alive():
                raise LaunchError(
                    f"label {folder.label!r} is in use: {server.title} on port {server.port}. End it with "
                    f"`VLLM_LABEL={folder.label} bash vllm_server/stop.sh`, or choose another VLLM_LABEL"
                )
        plan = make_plan(settings, environment)
        _print_plan(settings, plan)
        for model in plan.models if plan.engine.name == "vllm" else ():  # the transformers engine checks its own
            check_weights(plan.engine, model)
        processes = plan.processes  # the gateway first: it occupies the public port while models load

        def write(ready: bool) -> None:
            started = tuple(process.server for process in processes if process.child)
            folder.write(Group(settings.label, ready, started))

        try:
            interrupts.hold()
            for process in processes:
                start(process, folder.path, None if foreground else folder.log(process.server.title))
                write(ready=False)
            interrupts.release()
            wait_until_ready(processes, settings.api_key)
            interrupts.hold()  # from here a signal does not undo the launch; in the foreground _stay handles it
            for process in processes:
                members = tuple(session_members(process.server.leader))
                process.server = replace(process.server, members=members)
            write(ready=True)
        except BaseException:  # a failed launch (Ctrl-C included) leaves no process behind
            interrupts.hold()
            started = [process for process in processes if process.child]
            end_processes([], [process.server.leader for process in started], gently_s=5.0)
            for process in started:
                process.child.wait()
            folder.remove()
            raise
    front = processes[0].server
    print(f"Ready:  {', '.join(front.names)} at {front.url}/v1 (pid {front.leader.pid})")
    for process in processes:
        if process.server.log:
            print(f"Log:    {process.server.log}")
    print(f"Stop:   VLLM_LABEL={settings.label} bash vllm_server/stop.sh", flush=True)
    return _stay(folder, processes, interrupts) if foreground else 0


def _print_plan(settings: LaunchSettings, plan: LaunchPlan) -> None:
    gpus, engine = len(plan.gpus), plan.engine
    where = f"{engine.python}, {engine.note}" if engine.name == "vllm" else engine.python
    why = "" if engine.name == "vllm" else f"; {engine.note}"
    print(f"Engine: {engine.name} {engine.version} ({where}), {gpus or 'no'} GPU{'' if gpus == 1 else 's'}{why}")
    folders = {adapter.name: adapter.path for adapter in settings.adapters}
    for server in (process.server for process in plan.processes if process.server.model):
        place = f", GPU {','.join(server.gpus)}" if server.gpus else ""
        if plan.gateway:
            place += f", private port {server.port}"
        elif plan.copies > 1:
            place += f", {plan.copies} copies"
        print(f"Model:  {server.title} from {server.model}{place}")
        for name in server.names[1:]:
            print(f"        {name} (LoRA) from {folders[name]}")
    for note in plan.notes:
        print(f"Chosen: {note}")
    used = {gpu for process in plan.processes for gpu in process.server.gpus}
    if unused := [gpu for gpu in plan.gpus if gpu not in used]:
        print(f"GPUs {','.join(unused)} stay unused: VLLM_REPLICAS gives them copies of a model")
    if plan.gateway:
        workers = settings.gateway_workers
        print(f"Gateway in front, {workers} worker{'' if workers == 1 else 's'}")
    sys.stdout.flush()


def _stay(folder: LabelFolder, processes: list[PlannedProcess], interrupts: Interrupts) -> int:
    """Stays until the servers no longer serve every model, or a signal comes; then ends the rest."""
    status = 0
    try:
        interrupts.release()
        status = _watch(processes)
    except Interrupted:
        print("Stopping…", flush=True)
    interrupts.hold()
    end_servers([process.server for process in processes])
    for process in processes:
        process.child.wait()
    folder.remove_ended()
    return status


def _watch(processes: list[PlannedProcess]) -> int:
    """Waits until the front or all replicas of a model have ended; the exit status of the last, as a shell gives it."""
    reported = set()
    while True:
        for process in processes:
            server, status = process.server, exit_status(process.child.pid)
            if status is None:
                continue
            same_model = [other.child.pid for other in processes if other.server.name == server.name]
            if process is processes[0] or all(exit_status(pid) is not None for pid in same_model):
                return status if status >= 0 else 128 - status
            if server.title not in reported:
                reported.add(server.title)
                print(f"{server.title} ended with status {status}; the other replicas serve on", flush=True)
        time.sleep(_POLL_S)


def main() -> int:
    """Command line; the exit status."""
    parser = argparse.ArgumentParser(
        prog="launch.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--foreground", action="store_true", help="stay with the servers (containers); signals end them"
    )
    arguments = parser.parse_args()
    interrupts = Interrupts()
    interrupts.install()
    try:
        return launch(os.environ, arguments.foreground, interrupts)
    except LaunchError as error:
        print(f"launch: {error}", file=sys.stderr)
        return 1
    except Interrupted as error:
        print(f"launch: interrupted ({error}); nothing is left running", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
