"""Start the engine: ``python -m vllm_server.transformers_engine --model FOLDER --port 8000``."""

import argparse
import logging
import os
import sys

# GNU OpenMP's own value where threads outnumber cores. Its threads otherwise spin for milliseconds after each piece of
# work, on cores that the HTTP side and the trainer's processes need (measured: benchmarks/README.md).
SPIN_COUNT = "1000"


def named_folder(text: str) -> tuple[str, str]:
    """``NAME=FOLDER`` as a pair. Raises ArgumentTypeError for another form."""
    name, _, folder = text.partition("=")
    if not (name and folder):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=FOLDER")
    return name, folder


def main() -> int:
    """Command line; the exit status."""
    parser = argparse.ArgumentParser(description="Serve a judge with transformers (a subset of OpenAI's API)")
    parser.add_argument("--model", required=True, help="local folder or hub name of a Qwen2.5-VL, Qwen3-VL or Qwen3.5")
    parser.add_argument("--served-model-name", nargs="+", help="name(s) to serve it under")
    parser.add_argument(
        "--lora", nargs="+", type=named_folder, default=[], metavar="NAME=FOLDER", help="adapters, served unmerged"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-batch", type=int, default=64, help="requests in one forward")
    parser.add_argument("--image-cache-mb", type=int, default=512, help="encoded images to keep")
    parser.add_argument("--max-images", type=int, default=16, help="images in one request")
    parser.add_argument("--max-body-mb", type=int, default=32)
    arguments = parser.parse_args()
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is loaded, hence the imports here
    import torch
    import uvicorn

    from paco_grpo.asgi import SERVER_SETTINGS
    from vllm_server.transformers_engine.model import JudgeModel
    from vllm_server.transformers_engine.server import build_app

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # More threads would starve the HTTP side and the trainer on small machines.
    threads = os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(int(threads) if threads else max(1, (os.cpu_count() or 1) // 2))
    names = tuple(arguments.served_model_name or [arguments.model])
    try:
        adapters = dict(arguments.lora)
        model = JudgeModel.load(arguments.model, arguments.max_model_len, arguments.image_cache_mb, adapters)
    except (OSError, ValueError) as error:
        print(f"cannot serve {arguments.model}: {error}", file=sys.stderr)
        return 1
    app = build_app(
        model,
        names,
        adapters=adapters,
        max_batch=arguments.max_batch,
        max_images=arguments.max_images,
        max_body_bytes=arguments.max_body_mb << 20,
        api_key=os.environ.get("VLLM_API_KEY") or None,
    )
    uvicorn.run(
        app,
        host=arguments.host,
        port=arguments.port,
        **SERVER_SETTINGS,
        timeout_graceful_shutdown=10,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
