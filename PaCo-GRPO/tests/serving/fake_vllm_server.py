"""A fake of vLLM's server for the launch tests, which takes vLLM's command line.

FAKE_VLLM: the server of this name dies; "hangs": it never listens, and ignores SIGTERM; "breaks":
it dies on the first question.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("command", choices=["serve"])
parser.add_argument("model")
parser.add_argument("--served-model-name", required=True)
parser.add_argument("--host", required=True)
parser.add_argument("--port", type=int, required=True)
arguments, _ = parser.parse_known_args()
name = arguments.served_model_name
fault = os.environ.get("FAKE_VLLM", "")
subprocess.Popen(["sleep", "600"])  # as vLLM's engine process
print("Loading a model", flush=True)
if fault == name:
    sys.exit("ValueError: no room for the key-value cache")
if fault == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"data": [{"id": name}]})

    def do_POST(self):
        if fault == "breaks":
            print("RuntimeError: no kernel image", flush=True)
            os._exit(1)
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        choice = {"message": {"role": "assistant", "content": f"{name} {request['model']}"}}
        self.answer({"choices": [choice]})

    def answer(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())


class Server(ThreadingHTTPServer):
    allow_reuse_port = True  # as vLLM: several may listen on one port


Server((arguments.host, arguments.port), Handler).serve_forever()
