"""How GPUs are divided, and the command lines of engines and gateway."""

import json
import os
import subprocess
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_tools import VLLM_PYTHON, option

from vllm_server import plan
from vllm_server.engines import Engine, engine_command, gateway_command
from vllm_server.gpus import choose_gpus, divide_gpus, smallest_parallel_size, tensor_parallel_size
from vllm_server.models import Model
from vllm_server.settings import LaunchError, LaunchSettings, Weights
from vllm_server.state import Server

QWEN = {"num_attention_heads": 28, "num_key_value_heads": 4}
LISTING = "GPU 0: NVIDIA H200 (UUID: GPU-aaaa-1)\nGPU 1: NVIDIA H200 (UUID: GPU-bbbb-2)\n  MIG 1g (UUID: MIG-cccc-3)\n"


@pytest.mark.parametrize(
    ("gpus", "heads", "key_value_heads", "size"),
    [(8, 28, 4, 4), (4, 28, 4, 4), (3, 28, 4, 2), (1, 28, 4, 1), (8, 16, 2, 8), (4, 7, 7, 1), (16, 32, 8, 16)],
)
def test_tensor_parallel_size(gpus, heads, key_value_heads, size):
    assert tensor_parallel_size(gpus, {"num_attention_heads": heads, "num_key_value_heads": key_value_heads}) == size


@pytest.mark.parametrize(
    ("gibibytes", "memory", "size"),
    [(15.5, 80, 1), (15.5, 40, 1), (15.5, 24, 2), (137, 80, 4), (137, 141, 2), (900, 80, 4)],
)
def test_copies_get_as_few_gpus_as_they_fit_on(gibibytes, memory, size):
    """Qwen2.5-VL-7B and 72B; 7B's heads allow at most 4."""
    assert smallest_parallel_size(8, QWEN, int(gibibytes * 2**30), memory * 2**30, 0.85) == size


@pytest.mark.parametrize(
    ("environment", "sizes", "expected"),
    [
        ({}, [15], ((1,), (8,))), ({}, [15, 60], ((1, 2), (4, 2))), ({}, [15, None], ((None, None), (1, 1))),
        ({"VLLM_TP": "2"}, [15], ((2,), (1,))), ({"VLLM_REPLICAS": "2"}, [15], ((None,), (2,))),
    ],
)  # fmt: skip
def test_gpus_serve_copies_unless_told_otherwise(monkeypatch, environment, sizes, expected):
    """Eight GPUs of 80 GiB."""
    models = [Model(f"/m/{number}", f"m{number}", QWEN) for number in range(len(sizes))]
    environment = environment | {"VLLM_MODEL_PATHS": ",".join(model.path for model in models)}
    monkeypatch.setattr(plan, "smallest_memory", lambda gpus: 80 * 2**30)
    monkeypatch.setattr(plan, "weight_bytes", lambda path: (size := sizes[int(path[-1])]) and size * 2**30)
    settings = LaunchSettings.from_environment(environment)
    settings, notes = plan._choose_copies(VLLM, settings, models, tuple("01234567"), environment)
    assert (settings.tensor_parallel, settings.replicas) == expected
    assert bool(notes) == ("VLLM_TP" not in environment and "VLLM_REPLICAS" not in environment)


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
    ("gpus", "tensor_parallel", "replicas", "named"),
    [
        (1, [None, None], [1, 1], "2 models and 1 GPU"),
        (2, [4], [1], "A: VLLM_TP=4"),
        (2, [None], [3], "A: VLLM_TP=1 x VLLM_REPLICAS=3"),
        (8, [None, 4], [1, 2], "B: VLLM_TP=4 x VLLM_REPLICAS=2"),
        (8, [8], [1], "A: .*VLLM_TP=8"),
        (8, [3], [1], "A: .*VLLM_TP=3"),
    ],
)
def test_a_division_that_does_not_fit_is_refused(gpus, tensor_parallel, replicas, named):
    with pytest.raises(LaunchError, match=named):
        divided(gpus, tensor_parallel, replicas)


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        (None, ("0", "1")), (["1", "0"], ("1", "0")), (["GPU-bbbb"], ("GPU-bbbb",)), (["MIG-cccc-3"], ("MIG-cccc-3",)),
        (["2"], None), (["GPU-x"], None), (["cuda:0"], None), (["-1", "0"], None), (["0", "0"], None),
    ],
)  # fmt: skip
def test_gpus_must_exist(wanted, chosen):
    if chosen:
        assert choose_gpus(wanted, LISTING) == chosen
    else:
        with pytest.raises(LaunchError, match="CUDA_VISIBLE_DEVICES"):
            choose_gpus(wanted, LISTING)


SETTINGS = LaunchSettings.from_environment({"VLLM_MODEL_PATHS": "/m/judge/"})
VLLM, TRANSFORMERS = Engine("vllm", "py", "1", ""), Engine("transformers", "py", "1", "")
ADAPTERS = (Weights("/a/x", "x"), Weights("/a/y", "y"))


def command(engine=VLLM, gpus=(), copies=1, settings=SETTINGS, kind="qwen2_5_vl_text", **model) -> list[str]:
    config = QWEN | {"max_position_embeddings": 4096, "model_type": kind}
    model = Model("/m/judge", "judge", config, **model)
    server = Server("judge", "judge", model.path, "127.0.0.1", 20001, engine.name, names=model.names, gpus=gpus)
    return engine_command(engine, settings, model, server, copies)


def test_vllms_own_data_parallelism():
    words = command(gpus=tuple("01234567"), copies=2)
    assert option(words, "--tensor-parallel-size") == "4" and option(words, "--data-parallel-size") == "2"
    assert option(words, "--max-model-len") == "4096"
    assert "--data-parallel-size" not in command(gpus=("0",))


def test_qwen3_5_does_not_think_and_is_bfloat16_on_a_cpu():
    """vLLM's CPU build has its linear attention in nothing else."""
    words = command(kind="qwen3_5_text")
    assert option(words, "--default-chat-template-kwargs") == '{"enable_thinking": false}'
    assert option(words, "--dtype") == "bfloat16" and option(command(), "--dtype") == "float32"
    assert "--dtype" not in command(kind="qwen3_5_text", gpus=("0",))
    assert "--default-chat-template-kwargs" not in command()


@pytest.mark.parametrize(("engine", "name"), [(VLLM, "--lora-modules"), (TRANSFORMERS, "--lora")])
def test_adapters_on_the_command_line(engine, name):
    words = command(engine, adapters=ADAPTERS, lora_rank=33)
    at = words.index(name)
    assert words[at + 1 : at + 3] == ["x=/a/x", "y=/a/y"]
    if engine is VLLM:
        assert option(words, "--max-lora-rank") == "64" and option(words, "--max-loras") == "2"
    assert name not in command(engine)


def test_vllm_fetches_from_the_given_hosts_only():
    assert option(command(), "--allowed-media-domains") == "no/remote/media", "vLLM reads an empty list as every host"
    settings = replace(SETTINGS, media_hosts=("a.example", "b.example"))
    words = command(settings=settings)
    at = words.index("--allowed-media-domains")
    assert words[at + 1 : at + 3] == ["a.example", "b.example"]
    assert "--allowed-media-domains" not in command(replace(VLLM, limits_media=False)), "a vLLM that does not know it"


def test_the_gateway_gets_every_replica_and_adapter():
    servers = [
        Server("Judge", "Judge", "/m", "127.0.0.1", 20001, "vllm", names=("Judge", "x")),
        Server("Judge-2", "Judge", "/m", "127.0.0.1", 20002, "vllm", names=("Judge",)),
    ]
    words = gateway_command("py", SETTINGS, servers)
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
                      [module.name for module in given.lora_modules or []],
                      given.allowed_media_domains]))
"""


@pytest.mark.long
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="vLLM environment not installed")
def test_vllm_understands_its_command_line():
    """Its own parser reads what cannot be started here: several GPUs, copies, adapters."""
    lines = [
        command(gpus=tuple("01234567"), copies=2)[3:],
        command(gpus=("0",), adapters=ADAPTERS, lora_rank=33)[3:],
        command()[3:],
    ]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run(
        [str(VLLM_PYTHON), "-c", _PARSE], input=json.dumps(lines), env=environment,
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    read = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    nobody = ["no/remote/media"]
    assert read == [[4, 2, 16, [], nobody], [1, 1, 64, ["x", "y"], nobody], [1, 1, 16, [], nobody]]
