"""Start judge servers and wait until they answer.

One model: the engine itself answers on VLLM_PORT. Several models, replicas that vLLM does not make itself, an API key,
or VLLM_GATEWAY=always: engines get private ports of the loopback, and a gateway answers on VLLM_PORT.

What and where:
  VLLM_MODEL_PATHS, VLLM_MODEL_NAMES  folders or hub names, with commas between; names default to the folders'
  VLLM_LORA             name=path, with commas between: adapters served on their base without merging
  VLLM_HOST, VLLM_PORT  127.0.0.1, 8000
  VLLM_LABEL            default; launches with other labels and ports stand beside each other
  VLLM_API_KEY          then needed on every route but /health
Engines (one value for all models; VLLM_TP, VLLM_REPLICAS and VLLM_START_TIMEOUT also one for each):
  VLLM_ENGINE           auto | vllm | transformers; VLLM_PYTHON: vLLM's interpreter
  VLLM_TP               GPUs that share one copy of a model; default: as many as its heads allow
  VLLM_REPLICAS         1; copies of each model over the remaining GPUs
  GPU_MEMORY_UTILIZATION, MAX_MODEL_LEN, CUDA_VISIBLE_DEVICES   0.85, 8192, all (empty: the CPU)
  VLLM_EXTRA_ARGS       passed on to the engine as they are
  VLLM_START_TIMEOUT    1800 seconds
Gateway:
  VLLM_GATEWAY          auto | always
  VLLM_GATEWAY_WORKERS, VLLM_MAX_CONCURRENT, VLLM_MAX_BODY_MB, VLLM_REQUEST_TIMEOUT   1, 1024, 32, 600 seconds
PACO_RUNTIME_DIR: where state and logs lie.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace

from vllm_server.commands import gateway_command, gateway_environment, server_command, server_environment
from vllm_server.interrupts import Interrupted, Interrupts
from vllm_server.plan import LaunchPlan, make_plan
from vllm_server.processes import end_processes, exit_status, session_members
from vllm_server.servers import Started, end_group, start, wait_until_ready
from vllm_server.settings import LaunchError, LaunchSettings
from vllm_server.state import GATEWAY, GroupState, LabelFolder, ServerRecord, runtime_root

_POLL_S = 0.25


def launch(environment: Mapping[str, str], foreground: bool, interrupts: Interrupts) -> int:
    """Check, start, wait until ready; in the foreground also wait for the end. Returns an exit status."""
    settings = LaunchSettings.from_environment(environment)
    folder = LabelFolder(runtime_root(environment), settings.label)
    with folder.locked():
        _check_not_running(folder)
        plan = make_plan(settings, environment)
        _say_plan(settings, plan)
        started: list[Started] = []
        try:
            with interrupts.held():
                _start_all(settings, plan, environment, folder, foreground, started)
            interrupts.release()
            wait_until_ready(started, settings.api_key)
            interrupts.hold()  # it is up: a signal no longer undoes the launch; in the foreground _stay sees to it
            for one in started:
                one.record = replace(one.record, members=tuple(session_members(one.record.leader)))
            _write(folder, settings, started, ready=True)
        except BaseException:  # whatever ends the launch (Ctrl-C included) leaves no process behind
            with interrupts.held():
                end_processes([], [one.record.leader for one in started], gently_s=5.0)
                for one in started:
                    one.child.wait()
                folder.remove()
            raise
    _say_ready(settings, started)
    return _stay(folder, started, interrupts) if foreground else 0


def _check_not_running(folder: LabelFolder) -> None:
    state = folder.read()
    running = [server for server in state.servers if server.leader.alive()] if state else []
    if running:
        raise LaunchError(
            f"label {folder.label!r} is in use: {running[0].title} on port {running[0].port}. End it with "
            f"`VLLM_LABEL={folder.label} bash vllm_server/stop.sh`, or choose another VLLM_LABEL"
        )


def _say_plan(settings: LaunchSettings, plan: LaunchPlan) -> None:
    gpus, engine = len(plan.gpus), plan.engine
    print(f"Engine: {engine.name} {engine.version} ({engine.python}), {gpus or 'no'} GPU{'' if gpus == 1 else 's'}")
    for server in plan.servers:
        place = f", GPU {','.join(server.gpus)}" if server.gpus else ""
        place += f", {server.data_parallel} copies" if server.data_parallel > 1 else ""
        place += f", private port {server.port}" if plan.gateway else ""
        print(f"Model:  {server.title} from {server.model.path}{place}")
        for adapter in server.adapters:
            print(f"        {adapter.name} (LoRA) from {adapter.path}")
    if plan.unused_gpus:
        print(f"GPUs {','.join(plan.unused_gpus)} stay unused: VLLM_REPLICAS gives them copies of a model")
    if plan.gateway:
        print(f"Gateway in front, {settings.gateway.workers} worker{'' if settings.gateway.workers == 1 else 's'}")
    sys.stdout.flush()


def _start_all(
    settings: LaunchSettings,
    plan: LaunchPlan,
    environment: Mapping[str, str],
    folder: LabelFolder,
    foreground: bool,
    started: list[Started],
) -> None:
    """Start the gateway (which holds the public port meanwhile) and the engines; what runs is in ``started``."""
    engine = plan.engine
    if plan.gateway:
        names = tuple(name for server in plan.servers for name in server.names if server.replica == 1)
        log = None if foreground else folder.log(GATEWAY)
        child, leader = start(gateway_command(settings, plan), gateway_environment(environment), folder.path, log)
        path = str(log) if log else None
        record = ServerRecord(GATEWAY, GATEWAY, "", settings.host, settings.port, GATEWAY, path, leader, names=names)
        started.append(Started(child, record, names, max(settings.start_timeout_s) + 60))
        _write(folder, settings, started)
    for server in plan.servers:
        log = None if foreground else folder.log(server.title)
        command, variables = server_command(engine, settings, server), server_environment(engine, server, environment)
        child, leader = start(command, variables, folder.path, log)
        path = str(log) if log else None
        record = ServerRecord(
            server.title, server.model.name, server.model.path, server.host, server.port, engine.name, path, leader,
            names=server.names, gpus=server.gpus,
        )  # fmt: skip
        started.append(Started(child, record, server.names, server.start_timeout_s))
        _write(folder, settings, started)


def _write(folder: LabelFolder, settings: LaunchSettings, started: list[Started], ready: bool = False) -> None:
    folder.write(GroupState(settings.label, ready, tuple(one.record for one in started)))


def _say_ready(settings: LaunchSettings, started: list[Started]) -> None:
    front = started[0]
    print(f"Ready:  {', '.join(front.names)} at {settings.url}/v1 (pid {front.record.leader.pid})")
    for one in started:
        if one.log:
            print(f"Log:    {one.log}")
    print(f"Stop:   VLLM_LABEL={settings.label} bash vllm_server/stop.sh", flush=True)


def _stay(folder: LabelFolder, started: list[Started], interrupts: Interrupts) -> int:
    """Stay until the servers no longer serve every model, or a signal comes; then end what is left."""
    status = 0
    try:
        interrupts.let_go()
        status = _watch(started)
    except Interrupted:
        print("Stopping…", flush=True)
    with interrupts.held():
        end_group([one.record for one in started])
        for one in started:
            one.child.wait()
    folder.remove_ended()
    return status


def _watch(started: list[Started]) -> int:
    """Until the front or all replicas of a model have ended; the exit status of the last one, as a shell gives it."""
    said = set()
    while True:
        for one in started:
            status = exit_status(one.child.pid)
            if status is None:
                continue
            same = [other.child.pid for other in started if other.record.name == one.record.name]
            if one is started[0] or all(exit_status(pid) is not None for pid in same):
                return status if status >= 0 else 128 - status
            if one.record.title not in said:
                said.add(one.record.title)
                print(f"{one.record.title} ended with status {status}; the other replicas serve on", flush=True)
        time.sleep(_POLL_S)


def main() -> int:
    """Command line; the exit status."""
    parser = argparse.ArgumentParser(
        prog="launch.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--foreground", action="store_true", help="stay with the servers (containers); signals end them")
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
