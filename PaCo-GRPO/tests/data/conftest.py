"""The command that fetches public sets; copies that ``datasets`` makes of tables stay in the tests'
folder.
"""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "dataset"


@pytest.fixture
def fetch(monkeypatch, tmp_path):
    """The command's module; its conversion from ``source`` to ``out`` is ``fetch.run(name, …)``."""
    monkeypatch.syspath_prepend(FOLDER)  # as when it is run: `python dataset/fetch.py`
    module = importlib.import_module("fetch")
    arguments = ["--source", str(tmp_path / "source"), "--output", str(tmp_path / "out")]
    module.run = lambda name, *more: module.main([name, *arguments, *more])
    return module


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


@pytest.fixture(autouse=True)
def cache_of_datasets(monkeypatch, tmp_path_factory):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
