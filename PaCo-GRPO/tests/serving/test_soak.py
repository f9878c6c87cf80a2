"""Full load for minutes: gateway and two engines, callers who are good, bad, slow, or leave; memory and files stay level.

    PACO_SOAK_MINUTES=20 python -m pytest PaCo-GRPO/tests/serving/test_soak.py -s
"""

import asyncio
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from engine_tools import chat_body
from gateway_tools import GatewayProcess, health
from serving_tools import ROOT, free_port, wait_for

from paco_judge.images import data_url
from paco_judge.questions import build_messages

MINUTES = float(os.environ.get("PACO_SOAK_MINUTES", "2"))
CALLERS = 24


class Engine:
    """A real engine with a small cache, so that it is full soon."""

    def __init__(self, folder: Path):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm_server.transformers_engine", "--model", str(folder), "--port", str(port)]
        command += ["--served-model-name", "Tiny-Judge", "--max-model-len", "1024", "--image-cache-mb", "1"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)


def usage(pid: int) -> tuple[float, int]:
    """Resident memory in MiB, and open files."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20), len(os.listdir(f"/proc/{pid}/fd"))


async def load(url: str, tiny, until: float, seen: Counter) -> None:
    """Callers of all kinds until the time is over."""
    chance = random.Random(0)
    pictures = [data_url(tiny.picture(seed, size=28 + 4 * (seed % 20))) for seed in range(200)]
    port = int(url.rpartition(":")[2])

    def body(**fields) -> dict:
        messages = build_messages(*chance.sample(pictures, 2), f"same {chance.randrange(20)}?")
        return chat_body(tiny, messages=messages, max_tokens=1, **{"logprobs": True, "top_logprobs": 20} | fields)

    async def ask(http: aiohttp.ClientSession, expected: int, timeout_s: float = 300, **content) -> None:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with http.post(f"{url}/v1/chat/completions", timeout=timeout, **content) as answer:
            await answer.read()
            seen[answer.status] += 1
            assert answer.status == expected, await answer.text()

    async def half_open() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(chance.choice([b"", b"POST /v1", b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 99\r\n\r\n{"]))
        await asyncio.sleep(chance.random())
        writer.close()

    async def caller() -> None:
        async with aiohttp.ClientSession() as http:
            while time.monotonic() < until:
                kind = chance.choices(["good", "long", "bad", "image", "leaves", "slow"], [8, 1, 1, 1, 1, 1])[0]
                seen[kind] += 1
                if kind == "good":
                    await ask(http, 200, json=body())
                elif kind == "long":
                    await ask(http, 200, json=body() | {"max_tokens": 8, "stream": chance.random() < 0.5})
                elif kind == "bad":
                    await ask(http, 400, data=b'{"model": "Tiny-Judge", "messages": 3}')
                elif kind == "image":
                    url = "data:image/png;base64,AAAA"
                    await ask(http, 400, json=body() | {"messages": build_messages(pictures[0], url, "same?")})
                elif kind == "leaves":
                    with contextlib.suppress(TimeoutError):
                        await ask(http, 200, 0.02, json=body() | {"max_tokens": 500, "stream": chance.random() < 0.5})
                else:
                    await half_open()

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


@pytest.mark.long
@pytest.mark.timeout(MINUTES * 60 + 900)
def test_memory_and_files_stay_level(judge_folder, tiny):
    engines, gateway, seen = [Engine(judge_folder) for _ in range(2)], None, Counter()
    try:
        wait_for(lambda: all(health(engine.url) == 200 for engine in engines), 300)
        gateway = GatewayProcess({"Tiny-Judge": engines})
        pids = {"gateway": gateway.process.pid, "engine": engines[0].process.pid, "engine 2": engines[1].process.pid}
        samples: dict[str, list] = {name: [] for name in pids}

        async def run() -> None:
            loading = asyncio.create_task(load(gateway.url, tiny, time.monotonic() + MINUTES * 60, seen))
            while not loading.done():
                for name, pid in pids.items():
                    samples[name].append(usage(pid))
                await asyncio.wait([loading], timeout=MINUTES * 60 / 200)
            await loading

        asyncio.run(run())
        for name, rows in samples.items():
            quarters = [rows[len(rows) * i // 4 : len(rows) * (i + 1) // 4] for i in (1, 3)]
            (memory, files), (memory_end, files_end) = (
                [statistics.median(column) for column in zip(*quarter, strict=True)] for quarter in quarters
            )
            print(f"{name}: {memory:.0f} -> {memory_end:.0f} MiB, {files:.0f} -> {files_end:.0f} files", flush=True)
            assert memory_end <= 1.1 * memory + 16, f"{name}: memory grows"
            assert files_end <= files + 30, f"{name}: open files grow"
        print(dict(seen), flush=True)
        assert min(seen[kind] for kind in ("good", "long", "bad", "image", "leaves", "slow")) > 0
        wait_for(lambda: gateway.metrics()["paco_gateway_in_flight"] == 0)
        assert gateway.up("Tiny-Judge") == 2
    finally:
        for process in [engine.process for engine in engines] + [gateway.process] * (gateway is not None):
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)
