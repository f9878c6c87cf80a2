"""Pairs per second and latency of judge servers against the number of questions in flight.

    python benchmarks/judge_load.py --target transformers=http://127.0.0.1:8000 \\
        --model PaCo-Reward-7B

    # what the gateway costs: the same engine directly and through it
    python benchmarks/judge_load.py --target vllm=http://127.0.0.1:8001 \\
        --target gateway=http://127.0.0.1:8000 --model PaCo-Reward-7B --concurrency 1 16 64

    # two settings of one server, one after the other: the second table has the rows of both
    VLLM_API_SERVERS=1 bash vllm_server/launch.sh
    python benchmarks/judge_load.py --target 1-api-server=http://127.0.0.1:8000 \\
        --output benchmarks/results/one.json
    bash vllm_server/stop.sh; VLLM_API_SERVERS=4 bash vllm_server/launch.sh
    python benchmarks/judge_load.py --target 4-api-servers=http://127.0.0.1:8000 \\
        --against benchmarks/results/one.json

It asks what a training epoch asks: all pairs of the panels of 2x2 grids, one token, top 20
log-probabilities. Within a round every server is asked once, in random order, and figures are
medians over rounds. Every round uses new pictures because servers cache. Requests are built before
the clock starts, and the first round only warms up.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from PIL import Image

from paco_judge.client import DEFAULT_MODEL, JudgeClient
from paco_judge.grid import index_pairs, split_image
from paco_judge.images import data_url
from paco_judge.questions import build_messages, theme_question

# The toy judge only knows themes of its own world. Other judges take any text.
THEME = "2x2 grid layout depicting a filled purple triangle.The same triangle throughout."
PERCENTILES = (50, 90, 99)
DEADLINE_S = 300.0  # until a question counts as an error

Row = dict[str, Any]


def picture(rng: np.random.Generator, size: int) -> Image.Image:
    """A smooth random picture with a little noise, ``size`` pixels along a side."""
    coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC), dtype=np.float64)
    return Image.fromarray(
        np.clip(smooth + rng.normal(0, 3, (size, size, 3)), 0, 255).astype(np.uint8)
    )


def request_bodies(model: str, count: int, size: int, rng: np.random.Generator) -> list[bytes]:
    """``count`` requests about new pictures, in the form of the judge's client."""
    bodies = []
    while len(bodies) < count:
        urls = [data_url(cell) for cell in split_image(picture(rng, size), 2, 2)]
        for a, b in index_pairs(4):
            messages = build_messages([urls[a], urls[b]], theme_question(THEME))
            body = {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0}
            bodies.append(json.dumps(body | {"logprobs": True, "top_logprobs": 20}).encode())
    return bodies[:count]


async def ask(
    url: str, headers: dict, bodies: Sequence[bytes], concurrency: int
) -> tuple[float, list, list]:
    """Send all requests, ``concurrency`` at a time.

    Returns seconds, latencies in ms of the answered requests, and errors.
    """
    waiting = list(bodies)
    latencies = []
    errors = []

    async def worker(session: aiohttp.ClientSession) -> None:
        while waiting:
            body = waiting.pop()
            start = time.perf_counter()
            try:
                async with session.post(f"{url}/v1/chat/completions", data=body) as answer:
                    text = await answer.text()
            except (aiohttp.ClientError, TimeoutError) as error:
                errors.append(f"{type(error).__name__}: {error}")
                continue
            if answer.status == 200:
                latencies.append(1000 * (time.perf_counter() - start))
            else:
                errors.append(f"HTTP {answer.status}: {text[:200]}")

    limits = {
        "timeout": aiohttp.ClientTimeout(total=DEADLINE_S),
        "connector": aiohttp.TCPConnector(limit=0),
    }
    async with aiohttp.ClientSession(headers=headers, **limits) as session:
        start = time.perf_counter()
        await asyncio.gather(*(worker(session) for _ in range(concurrency)))
        return time.perf_counter() - start, latencies, errors


def run(arguments: argparse.Namespace, targets: Mapping[str, str]) -> list[Row]:
    """All rounds of all targets without the warm-up.

    Raises UserError: A server is missing or lacks the model.
    """
    key = arguments.api_key or os.environ.get("VLLM_API_KEY")
    models = {}
    for name, url in targets.items():
        models[name] = JudgeClient(url, model=arguments.model, api_key=key).check()
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    rng = np.random.default_rng(0)
    rows = []
    for index in range(arguments.rounds + 1):
        for concurrency in arguments.concurrency:
            for name in rng.permutation(list(targets)).tolist():
                count = max(arguments.pairs, concurrency) if index else concurrency
                bodies = request_bodies(models[name], count, arguments.size, rng)
                seconds, latencies, errors = asyncio.run(
                    ask(targets[name], headers, bodies, concurrency)
                )
                row = {
                    "target": name,
                    "concurrency": concurrency,
                    "round": index,
                    "errors": len(errors),
                    "pairs_per_second": len(latencies) / seconds,
                    "latencies_ms": latencies,
                    "first_error": errors[0] if errors else None,
                }
                print(progress(row, arguments.rounds), file=sys.stderr)
                if index > 0:  # the first round warms up
                    rows.append(row)
    return rows


def progress(row: Row, rounds: int) -> str:
    """A line about one round of one server."""
    line = (
        f"round {row['round']}/{rounds}, {row['concurrency']} in flight, {row['target']}: "
        f"{row['pairs_per_second']:.1f} pairs/s"
    )
    return f"{line}, {row['errors']} errors: {row['first_error']}" if row["errors"] else line


def summary(rounds: Sequence[Row]) -> list[Row]:
    """Medians over rounds by target and concurrency; no latency where no request was answered."""
    rows = []
    for target, level in sorted({(row["target"], row["concurrency"]) for row in rounds}):
        same = [row for row in rounds if (row["target"], row["concurrency"]) == (target, level)]
        speeds = [row["pairs_per_second"] for row in same]
        medians = {
            "target": target,
            "concurrency": level,
            "errors": sum(row["errors"] for row in same),
            "pairs_per_second": float(np.median(speeds)),
        }
        answered = [row["latencies_ms"] for row in same if row["latencies_ms"]]
        for percent in PERCENTILES:
            latencies = [np.percentile(latencies, percent) for latencies in answered]
            medians[f"p{percent}_ms"] = float(np.median(latencies)) if latencies else None
        rows.append(medians)
    return rows


def table(rows: Sequence[Row]) -> str:
    """The summary as text."""
    names = (
        "concurrency",
        "errors",
        "pairs_per_second",
        *(f"p{percent}_ms" for percent in PERCENTILES),
    )
    lines = [f"{'server':<16}" + "".join(f"{name:>18}" for name in names)]
    for row in rows:
        values = ("-" if row[name] is None else round(row[name], 1) for name in names)
        lines.append(f"{row['target']:<16}" + "".join(f"{value:>18}" for value in values))
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 2 where nothing can be measured."""
    arguments = parser().parse_args(words)
    settings = {name: getattr(arguments, name) for name in ("concurrency", "pairs", "size")}
    try:
        targets = read_targets(arguments.target)
        earlier = read_earlier(arguments.against, settings, targets)
        rounds = run(arguments, targets)
        if not any(row["latencies_ms"] for row in rounds):
            raise ValueError(f"no request was answered; first error: {rounds[0]['first_error']}")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = [*earlier, *summary(rounds)]
    settings |= {"model": arguments.model, "rounds": arguments.rounds, "target": arguments.target}
    report = {"settings": settings, "targets": rows, "rounds": rounds}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(rows))
    return 0


def read_targets(texts: Sequence[str]) -> dict[str, str]:
    """URL of each server by name. Raises ValueError."""
    targets: dict[str, str] = {}
    for text in texts:
        name, _, url = text.partition("=")
        if not (name and url) or name in targets:
            raise ValueError(f"--target {text!r} is not NAME=URL with a name that occurs once")
        targets[name] = url.rstrip("/").removesuffix("/v1")
    return targets


def read_earlier(
    reports: Sequence[Path], settings: Mapping[str, Any], targets: Mapping[str, str]
) -> list[Row]:
    """The rows of earlier reports.

    Raises OSError, ValueError: They cannot be compared with this measurement.
    """
    rows = []
    for file in reports:
        report = json.loads(file.read_text(encoding="utf-8"))
        for name, value in settings.items():
            if report["settings"][name] != value:
                raise ValueError(
                    f"--against {file}: it was measured with --{name} {report['settings'][name]}, "
                    f"not {value}"
                )
        rows += report["targets"]
    if repeated := targets.keys() & {row["target"] for row in rows}:
        raise ValueError(
            f"--target {min(repeated)}: --against has a server of this name; choose another"
        )
    return rows


def parser() -> argparse.ArgumentParser:
    """The arguments of this program."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument(
        "--target",
        action="append",
        required=True,
        metavar="NAME=URL",
        help="a server; may be repeated",
    )
    arguments.add_argument(
        "--model", default=DEFAULT_MODEL, help="served name, the same on every server"
    )
    arguments.add_argument(
        "--api-key", help="of the servers (default: the environment's VLLM_API_KEY)"
    )
    arguments.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 4, 16, 64], help="questions in flight"
    )
    arguments.add_argument(
        "--pairs",
        type=int,
        default=192,
        help="questions per round and concurrency (at least that many)",
    )
    arguments.add_argument(
        "--rounds", type=int, default=5, help="measured rounds, after one to warm up"
    )
    arguments.add_argument(
        "--size", type=int, default=64, help="pixels of a 2x2 grid; 1024 for a real generator's"
    )
    arguments.add_argument(
        "--against",
        type=Path,
        action="append",
        default=[],
        metavar="REPORT",
        help="report of an earlier run, whose rows are printed too; may be repeated",
    )
    arguments.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/judge_load.json")
    )
    return arguments


if __name__ == "__main__":
    sys.exit(main())
