"""A server behind the gateway: real HTTP over a real socket, with faults that tests choose while it runs.

python fake_upstream.py PORT; GET /mode/NAME chooses, GET /counts shows what it has seen. Standard library only: a test
starts several.
"""

import asyncio
import json
import sys
import time

PORT = int(sys.argv[1])
mode = "ok"
counts = {"path": "", "asked": 0, "in_flight": 0, "most": 0, "abandoned": 0, "connections": 0}


def answer(status: int, body: bytes, kind: str = "application/json", extra: str = "") -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{extra}\r\n"
    return head.encode() + body


def completion(request: dict) -> bytes:
    seen = {"port": PORT, "keys": sorted(request), "id": request.get("id")}
    return json.dumps({"object": "chat.completion", "choices": [], "seen": seen}).encode()


async def chat(writer: asyncio.StreamWriter, request: dict) -> bool:
    """Answers as ``mode`` says; whether the connection can be used again."""
    doing, _, seconds = mode.partition(":")
    if doing in ("ok", "slow"):
        await asyncio.sleep(float(seconds or 0))
        writer.write(answer(200, completion(request)))
    elif doing == "hold":  # until another mode is chosen
        while mode == "hold":
            await asyncio.sleep(0.02)
        writer.write(answer(200, completion(request)))
    elif doing == "garbage":
        writer.write(b"\x00\xff\xfe this is not HTTP \r\n\r\n")
        return False
    elif doing == "text":
        writer.write(answer(200, b"<html>It works!</html>", "text/html"))
    elif doing == "half":
        writer.write(answer(200, completion(request) + b" " * 500)[:150])
        return False
    elif doing == "close":
        return False
    elif doing == "500":
        writer.write(answer(500, b"Internal Server Error", "text/plain"))
    elif doing == "400":
        writer.write(answer(400, b'{"error": {"message": "no", "type": "x", "param": null, "code": null}}'))
    elif doing == "429":
        writer.write(answer(429, b'{"error": {"message": "full", "type": "x"}}', extra="retry-after: 7\r\n"))
    elif doing in ("hang", "stuck"):
        await asyncio.sleep(600)
    elif doing in ("stream", "broken"):
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        for number in range(5):
            event = f"data: {json.dumps({'number': number, 'made': time.time()})}\n\n".encode()
            writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
            await writer.drain()
            await asyncio.sleep(float(seconds or 0.2))
            if doing == "broken" and number == 1:
                return False
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    return True


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    global mode
    counts["connections"] += 1
    again = True
    try:
        while again:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split()[1]
            length = next(
                (int(x.split(":")[1]) for x in head.split("\r\n") if x.lower().startswith("content-length")), 0
            )
            body = await reader.readexactly(length)
            if path.startswith("/mode/"):
                mode = path.removeprefix("/mode/")
                counts.update(asked=0, most=0, abandoned=0)
                writer.write(answer(200, b"{}"))
            elif path == "/counts":
                writer.write(answer(200, json.dumps(counts).encode()))
            elif path == "/health":
                if mode == "stuck":
                    await asyncio.sleep(600)
                writer.write(answer(503 if mode == "sick" else 200, b""))
            else:
                counts["path"] = path
                try:
                    request = json.loads(body)
                except (ValueError, RecursionError):  # what this parser does not take and the gateway's does
                    request = {}
                again = await counted(reader, writer, request)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        counts["connections"] -= 1
        writer.close()


async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: dict) -> bool:
    """``chat``, counted; ended when the caller leaves, as in engines."""
    counts["asked"] += 1
    counts["in_flight"] += 1
    counts["most"] = max(counts["most"], counts["in_flight"])
    answering = asyncio.create_task(chat(writer, request))
    left = asyncio.create_task(reader.read(1))
    try:
        await asyncio.wait([answering, left], return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            return answering.result()
        counts["abandoned"] += 1
        return False
    finally:
        answering.cancel()
        counts["in_flight"] -= 1


async def main() -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", PORT, limit=1 << 26, backlog=1024)
    async with server:
        await server.serve_forever()


asyncio.run(main())
