"""How GPUs are divided and which command lines follow: pure functions."""

import json
import math
import os
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_tools import VLLM_PYTHON

from vllm_server.commands import gateway_command, server_command
from vllm_server.engines import Engine
from vllm_server.gpus import choose_gpus, divide_gpus, fits_heads, tensor_parallel_size
from vllm_server.plan import LaunchPlan, ServerPlan, free_ports
from vllm_server.settings import LaunchError, LaunchSettings, ServedAdapter, ServedModel

QWEN = {"num_attention_heads": 28, "num_key_value_heads": 4}
LISTING = "GPU 0: NVIDIA H200 (UUID: GPU-aaaa-1)\nGPU 1: NVIDIA H200 (UUID: GPU-bbbb-2)\n  MIG 1g (UUID: MIG-cccc-3)\n"


@pytest.mark.parametrize(
    ("gpus", "heads", "shared", "size"),
    [(8, 28, 4, 4), (4, 28, 4, 4), (3, 28, 4, 2), (1, 28, 4, 1), (8, 16, 2, 8), (4, 7, 7, 1), (16, 32, 8, 16)],
)
def test_tensor_parallel_size(gpus, heads, shared, size):
    assert tensor_parallel_size(gpus, {"num_attention_heads": heads, "num_key_value_heads": shared}) == size


@given(gpus=st.integers(1, 64), heads=st.integers(1, 64), shared=st.integers(1, 64))
def test_no_larger_power_of_two_would_do(gpus, heads, shared):
    config = {"num_attention_heads": heads, "num_key_value_heads": shared}
    size = tensor_parallel_size(gpus, config)
    assert size <= gpus and math.log2(size).is_integer() and (size == 1 or fits_heads(size, config))
    assert 2 * size > gpus or not fits_heads(2 * size, config)


def divided(gpus: int, tensor_parallel: list, replicas: list) -> list:
    names = ["A", "B", "C"][: len(replicas)]
    return divide_gpus([str(i) for i in range(gpus)], names, [QWEN] * len(names), tensor_parallel, replicas)


@pytest.mark.parametrize(
    ("gpus", "tensor_parallel", "replicas", "places"),
    [
        (8, [None], [1], [["0123"]]),
        (8, [None], [2], [["0123", "4567"]]),
        (8, [None], [3], [["01", "23", "45"]]),
        (8, [None, None], [1, 1], [["0123"], ["4567"]]),
        (3, [None, None], [1, 1], [["01"], ["2"]]),
        (8, [4, 1], [1, 4], [["0123"], ["4", "5", "6", "7"]]),
        (4, [1, None], [2, 1], [["0", "1"], ["23"]]),
        (4, [1], [1], [["0"]]),
    ],
)
def test_gpus_are_divided(gpus, tensor_parallel, replicas, places):
    assert divided(gpus, tensor_parallel, replicas) == [[tuple(place) for place in model] for model in places]


@given(
    gpus=st.integers(1, 16),
    models=st.lists(st.tuples(st.sampled_from([None, 1, 2, 4]), st.integers(1, 4)), min_size=1, max_size=3),
)
def test_no_gpu_is_given_twice(gpus, models):
    try:
        places = divided(gpus, [size for size, _ in models], [copies for _, copies in models])
    except LaunchError:
        return
    given_out = [gpu for model in places for place in model for gpu in place]
    assert len(given_out) == len(set(given_out)) <= gpus
    for (size, copies), model in zip(models, places, strict=True):
        assert len(model) == copies and len({len(place) for place in model}) == 1
        assert size in (None, len(model[0]))


@pytest.mark.parametrize(
    ("gpus", "tensor_parallel", "replicas", "message"),
    [
        (1, [None, None], [1, 1], "2 models and 1 GPU: vLLM needs one for each"),
        (2, [4], [1], "A: VLLM_TP=4 x VLLM_REPLICAS=1 needs 4 GPUs, and there are 2"),
        (2, [None], [3], "A: VLLM_TP=1 x VLLM_REPLICAS=3 needs 3 GPUs"),
        (8, [None, 4], [1, 2], "B: VLLM_TP=4 x VLLM_REPLICAS=2 needs 8 GPUs, and there are 4"),
        (8, [8], [1], "A: its attention heads cannot be divided over VLLM_TP=8"),
        (8, [3], [1], "A: its attention heads cannot be divided over VLLM_TP=3"),
    ],
)
def test_what_does_not_fit_is_said(gpus, tensor_parallel, replicas, message):
    with pytest.raises(LaunchError, match=message):
        divided(gpus, tensor_parallel, replicas)


def test_gpus_are_those_that_there_are():
    assert choose_gpus(None, LISTING) == ("0", "1") and choose_gpus(None, "") == ()
    assert choose_gpus(["1", "0"], LISTING) == ("1", "0")
    assert choose_gpus(["GPU-bbbb"], LISTING) == ("GPU-bbbb",) and choose_gpus(["MIG-cccc-3"], LISTING)
    for wrong in (["2"], ["GPU-x"], ["cuda:0"], ["-1", "0"]):
        with pytest.raises(LaunchError, match="there is no GPU"):
            choose_gpus(wrong, LISTING)
    with pytest.raises(LaunchError, match="names a GPU twice"):
        choose_gpus(["0", "0"], LISTING)


def test_private_ports_differ():
    ports = free_ports(50)
    assert len(set(ports)) == 50 and all(20000 <= port < 32768 for port in ports)


def server(**changes) -> ServerPlan:
    values = {
        "model": ServedModel("/m/judge", "Judge"),
        "config": {"text_config": QWEN | {"max_position_embeddings": 4096}},
    }
    values |= {"adapters": (), "lora_rank": 0, "replica": 1, "host": "127.0.0.1", "port": 20001, "gpus": ()}
    return ServerPlan(**values | {"data_parallel": 1, "start_timeout_s": 9.0} | changes)


SETTINGS = LaunchSettings.from_environment({"VLLM_MODEL_PATHS": "/m/judge", "VLLM_MODEL_NAMES": "Judge"})
VLLM, TRANSFORMERS = Engine("vllm", "py", "1", "vllm"), Engine("transformers", "py", "1", "transformers")


def value(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_vllms_own_data_parallelism():
    words = server_command(VLLM, SETTINGS, server(gpus=tuple("01234567"), data_parallel=2))
    assert value(words, "--tensor-parallel-size") == "4" and value(words, "--data-parallel-size") == "2"
    assert value(words, "--max-model-len") == "4096"
    assert "--data-parallel-size" not in server_command(VLLM, SETTINGS, server(gpus=("0",)))


def test_adapters_on_the_command_lines():
    adapters = (ServedAdapter("/a/x", "x"), ServedAdapter("/a/y", "y"))
    words = server_command(VLLM, SETTINGS, server(adapters=adapters, lora_rank=33))
    at = words.index("--lora-modules")
    assert words[at + 1 : at + 3] == ["x=/a/x", "y=/a/y"]
    assert value(words, "--max-lora-rank") == "64" and value(words, "--max-loras") == "2"
    words = server_command(TRANSFORMERS, SETTINGS, server(adapters=adapters, lora_rank=33))
    at = words.index("--lora")
    assert words[at + 1 : at + 3] == ["x=/a/x", "y=/a/y"]
    assert "--lora" not in server_command(TRANSFORMERS, SETTINGS, server())


def test_the_gateway_knows_every_replica_and_adapter():
    servers = (server(adapters=(ServedAdapter("/a/x", "x"),)), server(replica=2, port=20002))
    words = gateway_command(SETTINGS, LaunchPlan(VLLM, (), servers, True))
    upstreams = [words[i + 1] for i, word in enumerate(words) if word == "--upstream"]
    assert upstreams == [
        f"{name}=http://127.0.0.1:{port}" for name, port in (("Judge", 20001), ("x", 20001), ("Judge", 20002))
    ]


_PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for words in json.load(sys.stdin):
    given = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    print(json.dumps([given.tensor_parallel_size, given.data_parallel_size, given.max_lora_rank,
                      [module.name for module in given.lora_modules or []]]))
"""


@pytest.mark.long
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="vLLM environment not installed")
def test_vllm_understands_its_command_line():
    """Its own parser reads what we cannot start here: several GPUs, copies, adapters."""
    adapters = (ServedAdapter("/a/x", "x"), ServedAdapter("/a/y", "y"))
    servers = [
        server(gpus=tuple("01234567"), data_parallel=2),
        server(gpus=("0",), adapters=adapters, lora_rank=33),
        server(),
    ]
    lines = [server_command(VLLM, SETTINGS, one)[3:] for one in servers]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run(
        [str(VLLM_PYTHON), "-c", _PARSE], input=json.dumps(lines), env=environment,
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    read = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert read == [[4, 2, 16, []], [1, 1, 64, ["x", "y"]], [1, 1, 16, []]]
