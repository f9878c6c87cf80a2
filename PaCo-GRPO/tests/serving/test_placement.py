"""How GPUs are divided, and vLLM's command lines."""

import json
import os
import subprocess

import pytest
from serving_tools import VLLM_PYTHON, option

from vllm_server import plan
from vllm_server.engines import Engine, engine_command
from vllm_server.plan import (
    LaunchError,
    LaunchSettings,
    Model,
    Weights,
    choose_gpus,
    divide_gpus,
    parallel_size,
    read_models,
)

QWEN = {"num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 4096}
LISTING = "GPU 0: NVIDIA H200 (UUID: GPU-aaaa-1)\nGPU 1: NVIDIA H200 (UUID: GPU-bbbb-2)\n  MIG 1g (UUID: MIG-cccc-3)\n"


@pytest.mark.parametrize(
    ("gpus", "heads", "key_value_heads", "size"),
    [(8, 28, 4, 4), (3, 28, 4, 2), (8, 16, 2, 8), (4, 7, 7, 1)],
)
def test_tensor_parallel_size(gpus, heads, key_value_heads, size):
    assert parallel_size(gpus, {"num_attention_heads": heads, "num_key_value_heads": key_value_heads}) == size
    assert parallel_size(gpus, {}) == 1, "a configuration that leaves the heads to its class"


def divided(gpus: int, sizes: list, parallel: list, copies: list) -> list:
    models = [Model(f"/m/{i}", f"m{i}", QWEN, "qwen2_5_vl", size and size << 30) for i, size in enumerate(sizes)]
    settings = LaunchSettings.from_environment({"VLLM_MODEL_PATHS": ",".join(model.path for model in models)})
    settings = settings.model_copy(update={"tensor_parallel": tuple(parallel), "replicas": tuple(copies)})
    return [("".join(own), n) for own, n in divide_gpus(settings, models, [str(i) for i in range(gpus)])[0]]


@pytest.fixture(autouse=True)
def gpus_of_80_gib(monkeypatch):
    monkeypatch.setattr(plan, "smallest_memory", lambda gpus: 80 << 30)


@pytest.mark.parametrize(
    ("gpus", "sizes", "parallel", "copies", "places"),
    [
        (8, [15], [None], [None], [("01234567", 8)]),
        (8, [900], [None], [None], [("01234567", 2)]),
        (8, [15, 60], [None, None], [None, None], [("0123", 4), ("4567", 2)]),
        (8, [None], [None], [None], [("0123", 1)]),
        (8, [15], [None], [2], [("01234567", 2)]),
        (8, [15, 15], [4, 1], [1, 4], [("0123", 1), ("4567", 4)]),
        (4, [15, 15], [1, None], [2, 1], [("01", 2), ("23", 1)]),
    ],
)
def test_gpus_serve_copies_unless_told_otherwise(gpus, sizes, parallel, copies, places):
    assert divided(gpus, sizes, parallel, copies) == places


@pytest.mark.parametrize(
    ("gpus", "parallel", "copies", "named"),
    [
        (1, [None, None], [1, 1], "2 models on 1 GPU"),
        (8, [None, 4], [1, 2], "m1: VLLM_TP=4 x VLLM_REPLICAS=2"),
        (8, [8], [1], "m0: .*VLLM_TP=8"),
    ],
)
def test_a_division_that_does_not_fit_is_refused(gpus, parallel, copies, named):
    with pytest.raises(LaunchError, match=named):
        divided(gpus, [15] * len(parallel), parallel, copies)


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        (None, ("0", "1")), (["1", "0"], ("1", "0")), (["MIG-cccc-3"], ("MIG-cccc-3",)), (["2"], None), (["GPU-x"], None),
    ],
)  # fmt: skip
def test_gpus_must_exist(wanted, chosen):
    if chosen:
        assert choose_gpus(wanted, LISTING) == chosen
    else:
        with pytest.raises(LaunchError, match="CUDA_VISIBLE_DEVICES"):
            choose_gpus(wanted, LISTING)


def test_the_size_of_a_hub_model_is_that_of_its_cached_snapshot(tmp_path, monkeypatch):
    """Otherwise X-GenGroup/PaCo-Reward-7B gets one copy where its folder would get eight."""
    import huggingface_hub

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"} | QWEN))
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(b"\0" * 1000)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda name, file, **options: str(tmp_path / file))
    settings = LaunchSettings.from_environment({"VLLM_MODEL_PATHS": "X-GenGroup/PaCo-Reward-7B"})
    (model,) = read_models(settings)
    assert (model.path, model.name) == ("X-GenGroup/PaCo-Reward-7B", "PaCo-Reward-7B")
    assert model.weight_bytes == 1000 and model.family == "qwen2_5_vl"


SETTINGS = LaunchSettings.from_environment({"VLLM_MODEL_PATHS": "/m/judge/"})
VLLM = Engine("vllm", "py", "1", "")
ADAPTERS = (Weights("/a/x", "x"), Weights("/a/y", "y"))


def command(engine=VLLM, gpus=(), copies=1, settings=SETTINGS, family="qwen2_5_vl", **model) -> list[str]:
    model = Model("/m/judge", "judge", QWEN, family, None, **model)
    return engine_command(engine, settings, model, ("127.0.0.1", 20001), gpus, copies)


def test_qwen3_5_does_not_think_and_is_bfloat16_on_a_cpu():
    """vLLM's CPU build has its linear attention in nothing else."""
    words = command(family="qwen3_5")
    assert option(words, "--default-chat-template-kwargs") == '{"enable_thinking": false}'
    assert option(words, "--dtype") == "bfloat16" and option(command(), "--dtype") == "float32"
    assert "--dtype" not in command(family="qwen3_5", gpus=("0",))
    assert "--default-chat-template-kwargs" not in command()


def test_vllm_fetches_from_the_given_hosts_only():
    assert option(command(), "--allowed-media-domains") == "no/remote/media", "vLLM reads an empty list as every host"
    assert option(command(settings=SETTINGS.model_copy(update={"media_hosts": ("a.b",)})), "--allowed-media-domains") == "a.b"


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
    options = 5  # after the interpreter, -c, the program, serve and the model
    lines = [
        command(gpus=tuple("01234567"), copies=2)[options:],
        command(gpus=("0",), adapters=ADAPTERS, lora_rank=33)[options:],
        command()[options:],
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
