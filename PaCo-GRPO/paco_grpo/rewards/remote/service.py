"""A reward in a separate process and environment, over HTTP.

    python -m paco_grpo.rewards.remote.service --reward imagereward --port 8101 \\
        [--kwargs '{"batch_size": 16}'] [--device cuda]

For rewards whose package conflicts with the training environment; ``scripts/reward_service.sh``
creates an environment for them and starts this. The run uses it with
``reward_fn_kwargs={"imagereward": {"server": "http://127.0.0.1:8101"}}``. A ``--host`` other than
the loopback needs a key in the environment variable REWARD_SERVICE_KEY.

``/compute`` is for Flow-Factory (docs/other-trainers.md).
"""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from PIL import Image
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from paco_grpo.asgi import SERVER_SETTINGS
from paco_grpo.item import Item
from paco_grpo.rewards.registry import CheckedReward, build_rewards, short_name
from paco_grpo.rewards.remote.wire import (
    decode_compute,
    decode_request,
    encode_rewards,
    encode_scores,
)
from paco_judge.arguments import Parser
from paco_judge.errors import UserError
from paco_judge.files import hash_value
from paco_judge.pages.keys import LOOPBACK, KeyGuard

logger = logging.getLogger(__name__)


def build_app(reward: CheckedReward, name: str, api_key: str | None = None) -> Starlette:
    """The service of one ``reward``, called on one thread.

    ``GET /health`` says what is served, ``POST /score`` takes what ``wire`` writes, and ``POST
    /compute`` what Flow-Factory does. All need ``api_key``.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="reward")
    own = reward.identity()
    identity = f"sha256:{hash_value(own)}" if own["weights"] else None

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", "reward": name, "identity": identity})

    async def answer(
        request: Request,
        decode: Callable[[bytes], tuple[list[Image.Image], list[Item]]],
        encode: Callable[[Sequence[float]], bytes],
        failed_status: int,
    ) -> Response:
        body = await request.body()

        def score() -> bytes:
            images, items = decode(body)
            reward.check_items(items)
            return encode(reward(images, items).tolist())

        try:
            scores = await asyncio.get_running_loop().run_in_executor(thread, score)
        except Exception as error:
            logger.exception("the reward failed")
            problem = f"{type(error).__name__}: {error}"[:1000]
            return JSONResponse({"error": problem}, failed_status)
        return Response(scores, media_type="application/json")

    async def post_score(request: Request) -> Response:
        # The run reports an error and stops. Not a 5xx, which clients retry.
        return await answer(request, decode_request, encode_scores, 422)

    async def post_compute(request: Request) -> Response:
        # Flow-Factory stops at the field "error" and shows it; after a 4xx it would ask again.
        return await answer(request, decode_compute, encode_rewards, 200)

    routes = [
        Route("/health", health, methods=["GET"]),
        Route("/score", post_score, methods=["POST"]),
        Route("/compute", post_compute, methods=["POST"]),
    ]
    app = Starlette(routes=routes)
    if api_key:
        app.add_middleware(KeyGuard, key=api_key, open_paths=())
    return app


def main(arguments: list[str] | None = None) -> int:
    """Serve until stopped; returns 2 if the reward cannot work."""
    parser = Parser(
        prog="python -m paco_grpo.rewards.remote.service",
        description="A reward in a separate process and environment, over HTTP.",
    )
    parser.add_argument(
        "--reward", required=True, help="a reward's name, or package.module:factory"
    )
    parser.add_argument(
        "--kwargs", default={}, type=json.loads, help="JSON object: arguments of the reward"
    )
    parser.add_argument(
        "--device", default="cpu", help="where it computes: cpu, cuda, cuda:1 (default: cpu)"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8101)
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    key = os.environ.get("REWARD_SERVICE_KEY") or None
    if options.host not in LOOPBACK and key is None:
        parser.error(
            f"--host {options.host} opens the service to others: "
            "set REWARD_SERVICE_KEY, or use 127.0.0.1"
        )
    try:
        rewards = build_rewards(
            {options.reward: 1.0}, {options.reward: options.kwargs}, options.device
        )
        reward = rewards[short_name(options.reward)]
        if reward.compares_images:
            raise UserError(
                f"reward {options.reward!r} compares the images of a group, which requests do not "
                "keep together: use it without server="
            )
        if reward.needs_run:
            raise UserError(
                f"reward {options.reward!r} has seeds, epoch or begin, which requests do not give: "
                "use it without server="
            )
        reward.check()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    import uvicorn

    app = build_app(reward, options.reward, key)
    uvicorn.run(app, host=options.host, port=options.port, **SERVER_SETTINGS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
