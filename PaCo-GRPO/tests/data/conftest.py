"""The copies that ``datasets`` makes of tables stay in the tests' folder."""

import pytest


@pytest.fixture(autouse=True)
def cache_of_datasets(monkeypatch, tmp_path_factory):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
