import shutil

from paco_judge.compiler import missing_for_compilation


def test_a_compiler_and_the_headers_are_needed(tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    programs = {"gcc": "/usr/bin/gcc"}
    monkeypatch.setattr(shutil, "which", programs.get)
    assert "Python.h" in missing_for_compilation(tmp_path)
    (tmp_path / "Python.h").touch()
    assert missing_for_compilation(tmp_path) is None
    programs.clear()
    assert "gcc" in missing_for_compilation(tmp_path)
    programs["my-cc"] = "/opt/my-cc"
    monkeypatch.setenv("CC", "my-cc")
    assert missing_for_compilation(tmp_path) is None
