"""Pairs per second and latency of judge servers against the number of questions in flight.

Every server is asked the same kind of questions as a training epoch asks: all pairs of the panels of 2x2 grids, one
token, top 20 log-probabilities. Servers take turns within each round, in another order each round, so that a machine
that grows slower is not taken for a server that is; figures are medians over rounds, and comparisons are medians of
the ratios within a round. Pictures are new in every round (servers keep what they have seen), requests are built
before the clock starts, and the first round is not counted.

    python benchmarks/judge_load.py --target transformers=http://127.0.0.1:8000 --model PaCo-Reward-7B

    # what the gateway costs: the same engine directly and through it
    python benchmarks/judge_load.py --target vllm=http://127.0.0.1:8001 --target gateway=http://127.0.0.1:8000 \\
        --compare gateway/vllm --model PaCo-Reward-7B --concurrency 1 16 64

Prints the tables and writes everything, each round too, as JSON; ``tables.py`` makes tables and a plot of it.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from measuring import machine
from measuring.markdown import PERCENTILES, judge_load
from paco_judge import transport
from paco_judge.client import DEFAULT_MODEL, JudgeClient, JudgeError
from paco_judge.grid import pairs, split_image
from paco_judge.images import png_data_url
from paco_judge.questions import build_messages, theme_question
from paco_judge.transport import Refused, Unreachable

# The toy judge answers Yes or No on themes of its own world; for others any text will do.
THEME = "2x2 grid layout depicting a filled purple triangle.The same triangle throughout."


@dataclass(frozen=True)
class Round:
    """One server, one concurrency, one round."""

    target: str
    concurrency: int
    round: int
    seconds: float
    latencies_ms: list[float]  # of the answered requests
    errors: int
    first_error: str | None

    @property
    def pairs_per_second(self) -> float:
        return len(self.latencies_ms) / self.seconds

    def percentile(self, which: int) -> float:
        """Latency in ms; something must have been answered."""
        return float(np.percentile(self.latencies_ms, which))


def picture(rng: np.random.Generator, size: int) -> Image.Image:
    """A 2x2 grid of smooth random panels with a little noise, ``size`` pixels a side."""
    coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize(
        (size, size), Image.Resampling.BICUBIC
    )
    pixels = np.asarray(coarse, dtype=np.float64) + rng.normal(0, 3, (size, size, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def request_bodies(model: str, count: int, size: int, theme: str, rng: np.random.Generator) -> list[bytes]:
    """``count`` requests on new pictures, as the judge's client sends them."""
    bodies: list[bytes] = []
    while len(bodies) < count:
        urls = [png_data_url(cell) for cell in split_image(picture(rng, size), 2, 2)]
        for a, b in pairs(4):
            request = {"model": model, "messages": build_messages(urls[a], urls[b], theme_question(theme))}
            request |= {"max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 20}
            bodies.append(json.dumps(request).encode())
    return bodies[:count]


async def measure(url: str, headers: dict, bodies: Sequence[bytes], concurrency: int, deadline_s: float) -> tuple:
    """Send all requests, ``concurrency`` at a time: seconds, latencies in ms, errors."""
    runtime = transport.runtime()
    waiting, latencies, errors = list(reversed(bodies)), [], []

    async def worker() -> None:
        while waiting:
            body, start = waiting.pop(), time.perf_counter()
            try:
                await runtime.post(f"{url}/v1/chat/completions", headers, body, runtime.loop.time() + deadline_s)
                latencies.append(1000 * (time.perf_counter() - start))
            except (Refused, Unreachable) as error:
                errors.append(str(error))

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return time.perf_counter() - start, latencies, errors


def run(arguments: argparse.Namespace, targets: dict[str, str]) -> list[Round]:
    """All rounds of all targets; the first (warm-up) is left out. Raises JudgeError where a server is missing."""
    names = {
        name: JudgeClient(url, model=arguments.model, api_key=arguments.api_key).check()
        for name, url in targets.items()
    }
    headers = {"content-type": "application/json"}
    if arguments.api_key:
        headers["authorization"] = f"Bearer {arguments.api_key}"
    rng = np.random.default_rng(arguments.seed)
    rounds: list[Round] = []
    for number in range(arguments.rounds + 1):
        for concurrency in arguments.concurrency:
            for name in rng.permutation(list(targets)).tolist():
                count = max(arguments.pairs, concurrency) if number else concurrency
                bodies = request_bodies(names[name], count, arguments.size, arguments.theme, rng)
                asking = measure(targets[name], headers, bodies, concurrency, arguments.deadline)
                seconds, latencies, errors = transport.runtime().submit(asking).result()
                found = Round(name, concurrency, number, seconds, latencies, len(errors), next(iter(errors), None))
                where = f"round {number}/{arguments.rounds}, {concurrency} in flight, {name}"
                trouble = f", {found.errors} errors: {found.first_error}" if errors else ""
                print(f"{where}: {found.pairs_per_second:.1f} pairs/s{trouble}", file=sys.stderr)
                if number:
                    rounds.append(found)
    return rounds


def summary(rounds: Sequence[Round], names: Sequence[str], compare: Sequence[tuple[str, str]]) -> dict:
    """Medians over rounds by target and concurrency, and medians of within-round ratios for each comparison.

    A round without an answer has no latency and no part in a ratio; None where none has one.
    """
    by_key = {(each.target, each.concurrency, each.round): each for each in rounds}
    numbers, levels = sorted({each.round for each in rounds}), sorted({each.concurrency for each in rounds})
    targets = []
    for name in names:
        for level in levels:
            own = [by_key[name, level, number] for number in numbers]
            row = {"target": name, "concurrency": level, "errors": sum(each.errors for each in own)}
            row["pairs_per_second"] = median([each.pairs_per_second for each in own])
            answered = [each for each in own if each.latencies_ms]
            row |= {f"p{p}_ms": median([each.percentile(p) for each in answered]) for p in PERCENTILES}
            targets.append(row)
    compared = []
    for name, base in compare:
        for level in levels:
            two = [(by_key[name, level, number], by_key[base, level, number]) for number in numbers]
            two = [(a, b) for a, b in two if a.latencies_ms and b.latencies_ms]
            row = {"target": name, "base": base, "concurrency": level}
            row["throughput_ratio"] = median([a.pairs_per_second / b.pairs_per_second for a, b in two])
            row["p50_ratio"] = median([a.percentile(50) / b.percentile(50) for a, b in two])
            row["added_p50_ms"] = median([a.percentile(50) - b.percentile(50) for a, b in two])
            compared.append(row)
    return {"targets": targets, "compared": compared}


def median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write the JSON; returns the exit status: 0, 2 where nothing can be measured."""
    arguments = parser().parse_args(given)
    try:
        targets = named_urls(arguments.target)
        compare = comparisons(arguments.compare, list(targets))
        rounds = run(arguments, targets)
        if not any(each.latencies_ms for each in rounds):
            raise ValueError(f"no request was answered; first error: {rounds[0].first_error}")
    except (ValueError, JudgeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = summary(rounds, list(targets), compare)
    settings = {name: value for name, value in vars(arguments).items() if name not in ("output", "api_key")}
    report = machine.report("judge_load", settings, **found, rounds=[asdict(each) for each in rounds])
    machine.write(arguments.output, report)
    print(judge_load(report), end="")
    return 0


def named_urls(given: Sequence[str]) -> dict[str, str]:
    """``NAME=URL`` by name. Raises ValueError."""
    found: dict[str, str] = {}
    for text in given:
        name, separator, url = text.partition("=")
        if not (separator and name and url) or name in found:
            raise ValueError(f"--target {text!r} is not of the form NAME=URL with a name of its own")
        found[name] = url.rstrip("/").removesuffix("/v1")
    return found


def comparisons(given: Sequence[str] | None, names: Sequence[str]) -> list[tuple[str, str]]:
    """``NAME/BASE`` pairs; without any, every further target against the first. Raises ValueError."""
    if not given:
        return [(name, names[0]) for name in names[1:]]
    found = [tuple(text.split("/")) for text in given]
    for each in found:
        if len(each) != 2 or not set(each) <= set(names):
            raise ValueError(
                f"--compare {'/'.join(each)!r} is not NAME/BASE of two targets; there are {', '.join(names)}"
            )
    return found


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--target", action="append", required=True, metavar="NAME=URL", help="a server; several in turn")
    made.add_argument(
        "--compare", action="append", metavar="NAME/BASE", help="ratios to give (default: each target to the first)"
    )
    made.add_argument("--model", default=DEFAULT_MODEL, help="served name, the same on every server")
    made.add_argument("--api-key", help="if the servers want one")
    made.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64], help="questions in flight")
    made.add_argument(
        "--pairs", type=int, default=192, help="questions a round and concurrency (at least as many as in flight)"
    )
    made.add_argument("--rounds", type=int, default=5, help="counted rounds, after one to warm up")
    made.add_argument(
        "--size", type=int, default=64, help="pixels a side of the 2x2 grids; 1024 for a real generator's"
    )
    made.add_argument("--theme", default=THEME, help="theme sentence of the question")
    made.add_argument("--deadline", type=float, default=300.0, help="seconds until a question counts as an error")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--output", type=Path, default=Path("benchmarks/results/judge_load.json"))
    return made


if __name__ == "__main__":
    sys.exit(main())
