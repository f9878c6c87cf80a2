"""What a launch would start: how GPUs are divided, command lines and environments.

No process is started.
"""

import json
import os
import subprocess

import pytest
from fakes import free_port
from serving_tools import VLLM_PYTHON, option

from vllm_server import gpus as gpus_module
from vllm_server import launch
from vllm_server.engines import Engine, engine_command, num_api_servers, process_environment
from vllm_server.gpus import Place, divide_gpus, parallel_size, visible_gpus
from vllm_server.settings import LaunchError, LaunchSettings, Model, read_models

QWEN = {"num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 4096}
VLLM = Engine("vllm", "py", "1")


@pytest.fixture(autouse=True)
def eight_gpus_of_80_gib(monkeypatch):
    monkeypatch.setattr(gpus_module, "gpu_memory", lambda: [80 << 30] * 8)


def test_tensor_parallel_size():
    for gpus, heads, key_value_heads, size in (
        (8, 28, 4, 4),
        (3, 28, 4, 2),
        (8, 16, 2, 8),
        (4, 7, 7, 1),
    ):
        assert (
            parallel_size(
                gpus, {"num_attention_heads": heads, "num_key_value_heads": key_value_heads}
            )
            == size
        )
    assert parallel_size(4, {}) == 1, "a configuration that leaves the heads to its class"


def divided(gpus: int, sizes: list, parallel: str, copies: str) -> list:
    models = [
        Model(f"m{i}", f"/m/{i}", QWEN, "qwen2_5_vl", size << 30) for i, size in enumerate(sizes)
    ]
    paths = ",".join(model.path for model in models)
    variables = {"VLLM_MODEL_PATHS": paths, "VLLM_TP": parallel, "VLLM_REPLICAS": copies}
    settings = LaunchSettings.from_environment(variables)
    return [
        ("".join(own), n) for own, n in divide_gpus(settings, models, [str(i) for i in range(gpus)])
    ]


@pytest.mark.parametrize(
    ("gpus", "sizes", "parallel", "copies", "places"),
    [
        (8, [15], "", "", [("01234567", 8)]),
        (8, [900], "", "", [("01234567", 2)]),
        (8, [15, 60], "", "", [("0123", 4), ("4567", 2)]),
        (8, [0], "", "", [("0123", 1)]),
        (8, [15], "", "2", [("01234567", 2)]),
        (4, [15, 15], "1", "", [("0", 1), ("1", 1)]),
        (1, [15, 15], "", "1", "2 models on 1 GPU"),
        (8, [15, 15], "4", "2", "m1: VLLM_TP=4 x VLLM_REPLICAS=2"),
        (8, [15, 15], "", "5", "m0: VLLM_TP=1 x VLLM_REPLICAS=5"),
        (8, [15], "8", "1", "m0: .*VLLM_TP=8"),
    ],
)
def test_gpus_serve_copies_unless_told_otherwise(gpus, sizes, parallel, copies, places):
    if isinstance(places, str):
        with pytest.raises(LaunchError, match=places):
            divided(gpus, sizes, parallel, copies)
    else:
        assert divided(gpus, sizes, parallel, copies) == places


def test_gpus_must_exist():
    for wanted, chosen in {"": "", "-1": "", "1, 0": "10", "MIG-cccc-3": ["MIG-cccc-3"]}.items():
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": wanted}) == tuple(chosen)
    assert visible_gpus({}) == tuple("01234567")
    for wanted in ("8", "x"):
        with pytest.raises(LaunchError, match="CUDA_VISIBLE_DEVICES"):
            visible_gpus({"CUDA_VISIBLE_DEVICES": wanted})


def test_a_hub_model_has_the_settings_and_the_size_of_its_cached_snapshot(tmp_path, monkeypatch):
    import huggingface_hub

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"} | QWEN))
    (tmp_path / "preprocessor_config.json").write_text(
        '{"min_pixels": 3136, "max_pixels": 12845056}'
    )
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(b"\0" * 1000)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tmp_path))
    settings = LaunchSettings.from_environment({"VLLM_MODEL_PATHS": "X-GenGroup/PaCo-Reward-7B"})
    (model,) = read_models(settings)
    assert (model.path, model.name) == ("X-GenGroup/PaCo-Reward-7B", "PaCo-Reward-7B")
    assert model.weight_bytes == 1000 and model.family == "qwen2_5_vl"
    assert model.max_pixels == 12845056


@pytest.fixture
def planned(monkeypatch, model, two):
    """``planned(**variables)``: the servers that a launch would start with vLLM, by name.

    They serve one model by default.
    """
    monkeypatch.setattr(launch, "choose_engine", lambda *_: VLLM)
    monkeypatch.setattr(launch, "check_weights", lambda model: None)
    monkeypatch.chdir(model.parent)

    def plan_of(**variables):
        one = {
            "VLLM_MODEL_PATHS": "model",
            "VLLM_MODEL_NAMES": "Judge",
            "VLLM_PORT": str(free_port()),
        }
        servers = launch.plan_servers(
            LaunchSettings.from_environment(one | variables), one | variables
        )
        return {server.name: server for server in servers}

    return plan_of


def test_vllm_on_a_cpu(planned, model):
    variables = {
        "VLLM_HOST": "127.0.0.2",
        "VLLM_EXTRA_ARGS": "--seed 3",
        "VLLM_MAX_IMAGES": "5",
        "VLLM_LABEL": "a",
    }
    (judge,) = planned(**variables, CUDA_VISIBLE_DEVICES="").values()
    words = judge.command[3:]  # after the interpreter, -m and the program
    assert words[:2] == ["serve", str(model)], "relative folders become absolute"
    assert option(words, "--host") == "127.0.0.2" and judge.url.startswith("http://127.0.0.2:")
    assert "--api-server-count" not in words and "--mm-processor-kwargs" not in words
    assert option(words, "--max-model-len") == "2048", "no longer than the model's"
    assert json.loads(option(words, "--limit-mm-per-prompt")) == {"image": 5, "video": 0}
    assert "--enforce-eager" in words and words[-2:] == ["--seed", "3"]
    assert option(words, "--allowed-media-domains") == "no/remote/media", (
        "vLLM reads an empty list as every host"
    )
    environment = process_environment(
        "vllm", (), variables | {"PYTHONPATH": "/nowhere", "VLLM_X": "b"}
    )
    assert not environment.keys() & {*variables, "PYTHONPATH"}
    assert environment["VLLM_X"] == "b" and environment["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"
    assert (
        environment["VLLM_CPU_KVCACHE_SPACE"] == "2"
        and environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] == "75"
    )


def test_gpus_of_two_models(planned, two, capsys):
    assert planned()["Judge"].gpus == ("0",)
    assert "Using GPU 0 of 8; set CUDA_VISIBLE_DEVICES" in capsys.readouterr().out
    with pytest.raises(
        LaunchError, match="CUDA_VISIBLE_DEVICES is not set, so each model gets one"
    ):
        planned(VLLM_REPLICAS="8")
    (copied,) = planned(CUDA_VISIBLE_DEVICES="0,1", VLLM_REPLICAS="2").values()
    assert option(copied.command, "--data-parallel-size") == "2"
    assert "GPU 0,1, 2 copies" in capsys.readouterr().out
    gpus = {"CUDA_VISIBLE_DEVICES": "3,2,1,0", "VLLM_TP": "1"}
    servers = planned(**two, **gpus)
    assert "GPUs 1,0 stay unused" in capsys.readouterr().out
    assert (servers["Judge"].gpus, servers["Other"].gpus) == (("3",), ("2",))
    assert process_environment("vllm", ("3", "2"), gpus)["CUDA_VISIBLE_DEVICES"] == "3,2"
    assert servers["gateway"].names == ("Judge", "Other")
    assert f"--upstream=Other={servers['Other'].url}" in servers["gateway"].command


def test_requests_are_read_by_as_many_processes_as_cores_allow(planned, two, monkeypatch, capsys):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    (judge,) = planned(CUDA_VISIBLE_DEVICES="0").values()
    assert option(judge.command, "--api-server-count") == "4"
    output = capsys.readouterr().out
    assert "4 API servers (VLLM_API_SERVERS)" in output and "--api-server-count 4" in output
    threads = process_environment("vllm", ("0",), {}, judge.api_servers)
    assert threads["VLLM_MEDIA_LOADING_THREAD_COUNT"] == "2"
    (judge,) = planned(CUDA_VISIBLE_DEVICES="0", VLLM_API_SERVERS="2").values()
    assert option(judge.command, "--api-server-count") == "2"
    (judge,) = planned(CUDA_VISIBLE_DEVICES="0", VLLM_API_SERVERS="1").values()
    assert "--api-server-count" not in judge.command
    (judge,) = planned(CUDA_VISIBLE_DEVICES="0", VLLM_EXTRA_ARGS="--api-server-count 3").values()
    assert judge.command[-2:] == ["--api-server-count", "3"], "the last one wins"
    for cores, models, place, count in (
        (64, 1, Place(()), 1),
        (16, 1, Place(("0",)), 2),
        (4, 1, Place(("0",)), 1),
        (32, 2, Place(("0",)), 2),
        (64, 1, Place(tuple("01234567"), 8), 8),  # vLLM's own default is one for each copy
    ):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: range(cores))
        assert num_api_servers(SETTINGS, models, place) == count


def test_images_are_at_most_as_large_as_in_the_judges_training(planned, model, capsys):
    """A lower limit, which an exported judge has from its own training, is not raised."""
    file = model / "preprocessor_config.json"
    file.write_text('{"min_pixels": 3136, "max_pixels": 12845056}')
    (judge,) = planned(CUDA_VISIBLE_DEVICES="").values()
    assert option(judge.command, "--mm-processor-kwargs") == '{"max_pixels": 2097152}'
    output = capsys.readouterr().out
    assert "at most 2097152 pixels" in output and "VLLM_MAX_PIXELS" in output
    for variable, kwargs in ("0", None), ("20000000", None), ("1000000", '{"max_pixels": 1000000}'):
        (judge,) = planned(CUDA_VISIBLE_DEVICES="", VLLM_MAX_PIXELS=variable).values()
        assert ("--mm-processor-kwargs" in judge.command) == (kwargs is not None)
        assert kwargs is None or kwargs in judge.command
    for settings in (
        {"size": {"shortest_edge": 3136, "longest_edge": 1000000}},
        {"size": {"height": 448, "width": 448}},
        {"size": {"longest_edge": 980}},  # of another processor: pixels along a side
    ):
        file.write_text(json.dumps(settings))
        (judge,) = planned(CUDA_VISIBLE_DEVICES="").values()
        assert "--mm-processor-kwargs" not in judge.command
    file.write_text(json.dumps({"size": {"shortest_edge": 65536, "longest_edge": 16777216}}))
    transformers = Engine("transformers", "py", "1")
    (model,) = read_models(LaunchSettings.from_environment({"VLLM_MODEL_PATHS": str(model)}))
    words = engine_command(transformers, SETTINGS, model, ("127.0.0.1", 1), Place(()))
    assert option(words, "--max-pixels") == "2097152"


SETTINGS = LaunchSettings.from_environment({"VLLM_MODEL_PATHS": "/m/judge/"})


def command(gpus=(), copies=1, family="qwen2_5_vl", api_servers=1, **model) -> list[str]:
    model = Model("judge", "/m/judge", QWEN, family, 0, **model)
    place = Place(gpus, copies)
    return engine_command(VLLM, SETTINGS, model, ("127.0.0.1", 20001), place, api_servers)


def test_qwen3_5_does_not_think_and_is_bfloat16_on_a_cpu():
    """vLLM's CPU build has its linear attention in nothing else."""
    words = command(family="qwen3_5")
    assert option(words, "--default-chat-template-kwargs") == '{"enable_thinking": false}'
    assert option(words, "--dtype") == "bfloat16" and option(command(), "--dtype") == "float32"
    assert "--dtype" not in command(family="qwen3_5", gpus=("0",))
    assert "--default-chat-template-kwargs" not in command()


_PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for words in json.load(sys.stdin):
    given = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    print(json.dumps([given.tensor_parallel_size, given.data_parallel_size, given.api_server_count,
                      given.mm_processor_kwargs, given.allowed_media_domains]))
"""


@pytest.mark.long
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="vLLM environment not installed")
def test_vllm_understands_its_command_line():
    options = 5  # after the interpreter, -m, the program, serve and the model
    eight = command(tuple("01234567"), copies=2, api_servers=4, max_pixels=12845056)
    lines = [eight[options:], [*eight[options:], "--api-server-count", "3"], command()[options:]]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run(
        [str(VLLM_PYTHON), "-c", _PARSE],
        input=json.dumps(lines),
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    read = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert read == [
        [4, 2, 4, {"max_pixels": 2097152}, ["no/remote/media"]],
        [4, 2, 3, {"max_pixels": 2097152}, ["no/remote/media"]],
        [1, 1, None, None, ["no/remote/media"]],
    ]
