"""PaCo-RL end to end on a CPU: the driver behind `bash quickstart/run.sh`.

World, judge, benchmark, server, RL, report; each by the command that a user with GPUs types. Everything is written to
quickstart/out, logs of the commands to quickstart/out/logs. A second run continues after the last finished stage.
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

from paco_toy import summary as summaries
from paco_toy.console import Console, TimeLeft, clock
from paco_toy.drivers import drive, new_parser, parse_arguments
from paco_toy.processes import Commands, MemoryWatch, QuickstartError
from paco_toy.stages import STAGES, Context

REPO = Path(__file__).resolve().parents[2]
NEEDED_MB = 500
SETTINGS = ("quickstart/models/flux/**/*", "quickstart/models/judge/**/*", "PaCo-GRPO/config/*.py", "PaCo-Reward/config/toy_*.yaml")
VERSION = 1  # of what the stages write; another one starts over


def save(ctx: Context) -> None:
    """Write state.json, so that a kill leaves the old or the new one."""
    replacement = ctx.out / "state.tmp"
    content = {name: getattr(ctx, name) for name in ("key", "results", "seconds", "peak_rss_mb")}
    replacement.write_text(json.dumps(content, indent=1), encoding="utf-8")
    replacement.replace(ctx.out / "state.json")


def settings_key(seed: int, minutes: float | None, overrides: tuple[str, ...], repo: Path) -> str:
    """A hash of what a user changes to get other results: arguments, configurations, base models."""
    digest = hashlib.sha256(json.dumps([VERSION, seed, minutes, list(overrides)]).encode())
    for pattern in SETTINGS:
        for path in sorted(path for path in repo.glob(pattern) if path.is_file()):
            digest.update(str(path.relative_to(repo)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def run_stages(ctx: Context) -> None:
    """Run the stages that are not finished yet, in order."""
    served = False
    try:
        for stage in STAGES:
            # A server does not outlive the quickstart: without RL's results it is needed again.
            if stage.name in ctx.results and not (stage.name == "server" and "rl" not in ctx.results):
                ctx.console.stage(stage.name, stage.title, note="finished before")
                continue
            ctx.console.stage(stage.name, stage.title)
            served |= stage.name == "server"
            started = time.monotonic()
            ctx.results[stage.name] = stage.work(ctx)
            ctx.seconds[stage.name] = time.monotonic() - started
            save(ctx)
            if stage.name == "rl":
                ctx.server.stop()
                served = False
    finally:
        ctx.commands.stop()
        if served:
            with contextlib.suppress(QuickstartError):  # the first failure is the one to report
                ctx.server.stop()


def finish(ctx: Context) -> None:
    """summary.json, and the last lines on the terminal."""
    found = summaries.build(ctx.results, ctx.seconds, ctx.peak_rss_mb, ctx.seed, ctx.repo)
    path = ctx.out / "summary.json"
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    gained = found["policy"]["change"]["consistency"]
    seconds = clock(sum(ctx.seconds.values()))
    ctx.console.line("\n".join([
        "", summaries.table(found), "",
        f"Consistency {gained['mean']:+.3f} (standard error {gained['stderr']:.3f}), read by an oracle that nothing was trained on.",
        f"{seconds} in all, peak memory {ctx.peak_rss_mb} MB, judge served by {found['engine']}.",
        f"Numbers: {path}", f"Report:  {ctx.out / 'report.html'}",
    ]), indent=0)  # fmt: skip


def prepare(arguments: argparse.Namespace, out: Path) -> Context:
    """The context, with the results of an earlier run with the same settings."""
    seed, minutes, overrides = arguments.seed, arguments.minutes, arguments.overrides
    free = shutil.disk_usage(out).free >> 20
    if free < NEEDED_MB:
        raise QuickstartError(f"{free} MB free on the disk of {out}, {NEEDED_MB} MB needed. Free some and run it again.")
    console = Console(TimeLeft({stage.name: stage.expected for stage in STAGES}))
    commands = Commands(out / "logs", console.progress)
    ctx = Context(REPO, out, os.environ.get("PYTHON") or sys.executable, seed, commands, console, minutes, overrides)
    if arguments.rebuild:
        console.line("\nBuilding the toy base models again (up to 90 minutes on two cores)", indent=0)
        build = [ctx.python, "-m", "toy_models.build", "--out", ctx.models]
        commands.run(build, REPO / "tools", "0-models", "building")
    ctx.key = settings_key(seed, minutes, overrides, ctx.repo)
    path = out / "state.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"key": ctx.key}
    except ValueError:
        found = {}
    same = found.get("key") == ctx.key
    if same and not arguments.fresh and not arguments.rebuild:
        vars(ctx).update(found)
    else:
        if not same and not arguments.fresh:
            console.line("other settings, configurations or base models than last time: starting over", indent=0)
        for entry in out.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    console.time_left.spent = ctx.seconds
    return ctx


def main(argv: list[str] | None = None) -> int:
    """Entry point; see ``paco_toy.drivers.drive`` for the exit status."""
    parser = new_parser("run.sh", __doc__, "everything: data, judge, RL", minutes=6.5)
    parser.add_argument("--rebuild", action="store_true", help="first build the toy base models again (90 minutes)")
    arguments = parse_arguments(parser, argv)
    out = REPO / "quickstart" / "out"

    def work() -> None:
        ctx = prepare(arguments, out)
        with MemoryWatch() as memory:
            try:
                run_stages(ctx)
            finally:
                ctx.peak_rss_mb = max(ctx.peak_rss_mb, memory.peak_mb)
                save(ctx)
        finish(ctx)

    return drive("quickstart", out, work)


if __name__ == "__main__":
    sys.exit(main())
