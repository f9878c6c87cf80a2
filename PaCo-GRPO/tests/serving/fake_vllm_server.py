"""A fake of vLLM's server for the launch tests.

It takes vLLM's command line, and fails as FAKE_VLLM requests.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("command", choices=["serve"])
parser.add_argument("model")
parser.add_argument("--served-model-name", required=True)
parser.add_argument("--host", required=True)
parser.add_argument("--port", type=int, required=True)
arguments, rest = parser.parse_known_args()
fault = os.environ.get("FAKE_VLLM", "")
if fault.partition(" ")[0] not in (arguments.served_model_name, fault.partition(" ")[0].lower()):
    fault = ""  # "Other dies" is meant for the server of that name
names = [arguments.served_model_name]
if folder := os.environ.get("FAKE_VLLM_RECORD"):
    child = subprocess.Popen(["sleep", "600"])  # as vLLM's engine process
    record = {"argv": sys.argv[1:], "env": dict(os.environ), "pids": [os.getpid(), child.pid]}
    Path(folder).mkdir(exist_ok=True)
    part = Path(folder, f"{arguments.port}.part")
    part.write_text(json.dumps(record))
    part.rename(part.with_suffix(".json"))
if "stubborn" in fault:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("Loading a model", flush=True)
if "dies" in fault:
    sys.exit("ValueError: no room for the key-value cache")
if "hangs" in fault:
    time.sleep(600)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer({"data": [{"id": name} for name in names]})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        choice = {"message": {"role": "assistant", "content": request["model"]}}
        self.answer({"choices": [choice]})

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    allow_reuse_port = True  # as vLLM: several may listen on one port


Server((arguments.host, arguments.port), Handler).serve_forever()
