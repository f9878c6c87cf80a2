"""PaCo-RL end to end on a CPU: the driver behind `bash quickstart/run.sh`.

World, judge, benchmark, server, RL, report; each by the command that a user with GPUs types. Everything goes to
quickstart/out; logs of the commands to quickstart/out/logs. Run again, it continues after the last finished stage.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from paco_toy import summary as summaries
from paco_toy.console import Console, TimeLeft, clock
from paco_toy.drivers import end_as_by_ctrl_c, new_parser, only_one, parse_arguments
from paco_toy.processes import Commands, MemoryWatch, QuickstartError
from paco_toy.stages import STAGES, Context, stop_server

REPO = Path(__file__).resolve().parents[2]
NEEDED_MB = 500
BASES = ("flux", "judge")  # folders in quickstart/models
VERSION = 1  # of what the stages write; another one starts over


class State:
    """Which stages are finished, with what they found; written after each, atomically."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        self.results: dict[str, dict[str, Any]] = {}
        self.seconds: dict[str, float] = {}
        self.peak_rss_mb = 0
        self.other_settings = False
        if path.is_file():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                found = {}
            self.other_settings = found.get("key") != key
            if not self.other_settings:
                self.results, self.seconds, self.peak_rss_mb = found["results"], found["seconds"], found["peak_rss_mb"]

    def save(self) -> None:
        """Write, so that a kill leaves the old or the new state."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"key": self.key, "results": self.results, "seconds": self.seconds, "peak_rss_mb": self.peak_rss_mb}
        replacement = self.path.with_suffix(".tmp")
        replacement.write_text(json.dumps(content, indent=1), encoding="utf-8")
        replacement.replace(self.path)


def settings_key(seed: int, minutes: float | None, overrides: tuple[str, ...], models: Path) -> str:
    """A hash of what the results depend on: arguments and the base models' bytes."""
    digest = hashlib.sha256(json.dumps([VERSION, seed, minutes, list(overrides)]).encode())
    for path in sorted(models.rglob("*")):
        # editors' bases and build logs lie there too, but nothing here depends on them
        if path.is_file() and path.relative_to(models).parts[0] in BASES:
            digest.update(str(path.relative_to(models)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def clear(out: Path) -> None:
    """Empty the output folder."""
    for entry in out.iterdir():
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def rebuild(ctx: Context) -> None:
    """Build the toy base models again."""
    ctx.console.line("\nBuilding the toy base models again (up to 90 minutes on two cores)", indent=0)
    ctx.commands.run([ctx.python, "-m", "paco_toy.build_models", "--out", ctx.models], ctx.repo, "0-models", "building")


def run_stages(ctx: Context, state: State) -> None:
    """Run what is not finished yet, in order."""
    todo = [stage for stage in STAGES if stage.name not in state.results]
    served = False
    try:
        for number, stage in enumerate(STAGES, 1):
            later = any(s.name in ("rl",) for s in todo)
            if stage.name in state.results and not (stage.always and later):
                ctx.console.line(f"[{number}/{len(STAGES)}] {stage.title}: finished before", indent=0)
                continue
            ctx.console.stage(number, stage.name, stage.title)
            served |= stage.name == "server"
            started = time.monotonic()
            ctx.results[stage.name] = stage.work(ctx)
            ctx.seconds[stage.name] = ctx.console.time_left.spent[stage.name] = time.monotonic() - started
            state.results, state.seconds = ctx.results, ctx.seconds
            state.save()
            if stage.name == "rl":
                stop_server(ctx)
                served = False
    finally:
        ctx.commands.stop()
        if served:
            with contextlib.suppress(QuickstartError):  # the first failure is the one to report
                stop_server(ctx)


def finish(ctx: Context, state: State) -> None:
    """summary.json, and the last lines on the terminal."""
    found = summaries.build(ctx.results, ctx.seconds, state.peak_rss_mb, ctx.seed, ctx.repo)
    path = ctx.out / "summary.json"
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    gained, error = summaries.gain(found)
    lines = ["", summaries.table(found), ""]
    lines.append(f"Oracle consistency {gained:+.3f} (standard error {error:.3f}); nothing was trained on the oracle.")
    lines.append(f"{clock(sum(ctx.seconds.values()))} in all, peak memory {state.peak_rss_mb} MB, judge served by {found['engine']}.")
    lines += [f"Numbers: {path}", f"Report:  {ctx.out / 'report.html'}"]
    ctx.console.line("\n".join(lines), indent=0)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = new_parser("run.sh", __doc__, "everything: data, judge, RL")
    parser.add_argument("--rebuild", action="store_true", help="first build the toy base models again (up to 90 minutes)")
    return parse_arguments(parser, argv)


def prepare(arguments: argparse.Namespace, out: Path) -> tuple[Context, State]:
    """The context and what an earlier run finished with the same settings."""
    free = shutil.disk_usage(out).free >> 20
    if free < NEEDED_MB:
        raise QuickstartError(f"{free} MB free on the disk of {out}, {NEEDED_MB} MB needed. Free some space and run it again.")
    console = Console(TimeLeft({stage.name: stage.expected for stage in STAGES}), len(STAGES))
    ctx = Context(REPO, out, os.environ.get("PYTHON") or sys.executable, arguments.seed, Commands(out / "logs", console.progress),
                  console, minutes=arguments.minutes, overrides=arguments.overrides)  # fmt: skip
    if arguments.rebuild:
        rebuild(ctx)
    state = State(out / "state.json", settings_key(arguments.seed, arguments.minutes, arguments.overrides, ctx.models))
    if arguments.fresh or arguments.rebuild or state.other_settings:
        if state.other_settings and not arguments.fresh:
            console.line("other settings or base models than last time: starting over", indent=0)
        clear(out)
        state = State(out / "state.json", state.key)
    ctx.results, ctx.seconds = dict(state.results), dict(state.seconds)
    console.time_left.spent.update(state.seconds)
    return ctx, state


def main(argv: list[str] | None = None) -> int:
    """Entry point; 0 when everything ran, 1 with one message when not, 130 after Ctrl-C."""
    arguments = parse(argv)
    out = REPO / "quickstart" / "out"
    end_as_by_ctrl_c()
    try:
        with only_one(out):
            ctx, state = prepare(arguments, out)
            with MemoryWatch() as memory:
                try:
                    run_stages(ctx, state)
                finally:
                    state.peak_rss_mb = max(state.peak_rss_mb, memory.peak_mb)
                    state.save()
            finish(ctx, state)
    except QuickstartError as error:
        print(f"\nquickstart: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno != 28:
            raise
        print("\nquickstart: no space left on the disk. Free some and run it again; it goes on from here.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nquickstart: interrupted, servers stopped. Run it again to go on after the last finished stage.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
