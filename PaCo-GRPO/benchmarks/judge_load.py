"""Pairs per second and latency of judge servers against the number of questions in flight.

    python benchmarks/judge_load.py --target transformers=http://127.0.0.1:8000 --model PaCo-Reward-7B

    # what the gateway costs: the same engine directly and through it
    python benchmarks/judge_load.py --target vllm=http://127.0.0.1:8001 --target gateway=http://127.0.0.1:8000 \\
        --model PaCo-Reward-7B --concurrency 1 16 64

It asks what a training epoch asks: all pairs of the panels of 2x2 grids, one token, top 20 log-probabilities.
Within a round every server is asked once, in random order; figures are medians over rounds. Every round uses new pictures
(servers cache), requests are built before the clock starts, and the first round only warms up.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from PIL import Image

from paco_judge.client import DEFAULT_MODEL, JudgeClient, JudgeError
from paco_judge.grid import pairs, split_image
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
        for a, b in pairs(4):
            messages = build_messages([urls[a], urls[b]], theme_question(THEME))
            body = {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0}
            bodies.append(json.dumps(body | {"logprobs": True, "top_logprobs": 20}).encode())
    return bodies[:count]


async def ask(
    url: str, headers: dict, bodies: Sequence[bytes], concurrency: int
) -> tuple[float, list, list]:
    """Send all requests, ``concurrency`` at a time: seconds, latencies in ms of the answered ones, errors."""
    waiting, latencies, errors = list(bodies), [], []

    async def worker(session: aiohttp.ClientSession) -> None:
        while waiting:
            body, start = waiting.pop(), time.perf_counter()
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
    """All rounds of all targets without the warm-up. Raises JudgeError: A server is missing or lacks the model."""
    key = arguments.api_key
    models = {
        name: JudgeClient(url, model=arguments.model, api_key=key).check()
        for name, url in targets.items()
    }
    headers = {"content-type": "application/json"} | (
        {"authorization": f"Bearer {key}"} if key else {}
    )
    rng, rounds = np.random.default_rng(0), []
    for index in range(arguments.rounds + 1):
        for concurrency in arguments.concurrency:
            for name in rng.permutation(list(targets)).tolist():
                count = max(arguments.pairs, concurrency) if index else concurrency
                bodies = request_bodies(models[name], count, arguments.size, rng)
                seconds, latencies, errors = asyncio.run(
                    ask(targets[name], headers, bodies, concurrency)
                )
                found = {
                    "target": name,
                    "concurrency": concurrency,
                    "round": index,
                    "errors": len(errors),
                }
                found |= {"pairs_per_second": len(latencies) / seconds, "latencies_ms": latencies}
                found["first_error"] = errors[0] if errors else None
                trouble = f", {len(errors)} errors: {errors[0]}" if errors else ""
                where = f"round {index}/{arguments.rounds}, {concurrency} in flight, {name}"
                print(f"{where}: {found['pairs_per_second']:.1f} pairs/s{trouble}", file=sys.stderr)
                rounds += [found] if index else []
    return rounds


def summary(rounds: Sequence[Row]) -> list[Row]:
    """Medians over rounds by target and concurrency; no latency where no request was answered."""
    rows = []
    for target, level in sorted({(each["target"], each["concurrency"]) for each in rounds}):
        own = [each for each in rounds if (each["target"], each["concurrency"]) == (target, level)]
        row = {
            "target": target,
            "concurrency": level,
            "errors": sum(each["errors"] for each in own),
        }
        row["pairs_per_second"] = float(np.median([each["pairs_per_second"] for each in own]))
        for percent in PERCENTILES:
            found = [
                np.percentile(each["latencies_ms"], percent) for each in own if each["latencies_ms"]
            ]
            row[f"p{percent}_ms"] = float(np.median(found)) if found else None
        rows.append(row)
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


def main(given: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 2 where nothing can be measured."""
    arguments = parser().parse_args(given)
    try:
        targets: dict[str, str] = {}
        for text in arguments.target:
            name, _, url = text.partition("=")
            if not (name and url) or name in targets:
                raise ValueError(f"--target {text!r} is not NAME=URL with a name that occurs once")
            targets[name] = url.rstrip("/").removesuffix("/v1")
        rounds = run(arguments, targets)
        if not any(each["latencies_ms"] for each in rounds):
            raise ValueError(f"no request was answered; first error: {rounds[0]['first_error']}")
    except (ValueError, JudgeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    settings = {
        name: value for name, value in vars(arguments).items() if name not in ("output", "api_key")
    }
    rows = summary(rounds)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    made = {"settings": settings, "targets": rows, "rounds": rounds}
    arguments.output.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(table(rows))
    return 0


def parser() -> argparse.ArgumentParser:
    """The arguments of this program."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--target",
        action="append",
        required=True,
        metavar="NAME=URL",
        help="a server; may be repeated",
    )
    made.add_argument(
        "--model", default=DEFAULT_MODEL, help="served name, the same on every server"
    )
    made.add_argument("--api-key", help="if the servers want one")
    made.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 4, 16, 64], help="questions in flight"
    )
    made.add_argument(
        "--pairs",
        type=int,
        default=192,
        help="questions per round and concurrency (at least that many)",
    )
    made.add_argument("--rounds", type=int, default=5, help="measured rounds, after one to warm up")
    made.add_argument(
        "--size", type=int, default=64, help="pixels of a 2x2 grid; 1024 for a real generator's"
    )
    made.add_argument("--output", type=Path, default=Path("benchmarks/results/judge_load.json"))
    return made


if __name__ == "__main__":
    sys.exit(main())
