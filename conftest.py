"""House rules for every test of the repository: a test that did not run must say an allowed reason, or the run fails.

Thread counts are fixed before torch is imported: `test.sh` runs two workers on (at least) two cores.
"""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# DeepSpeed is an extra for GPU machines: where it is installed, torchrun aborts on a machine like CI's.
ALLOWED_SKIPS = ("no GPU", "shared/data absent", "vLLM environment not installed", "DeepSpeed not installed")

_refused: dict[str, str] = {}


def skip_reason(report) -> str | None:
    """The reason of a skipped test or module, None if it was not skipped (an expected failure is not a skip)."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return None
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ").strip()


def _note(report) -> None:
    reason = skip_reason(report)
    if reason is not None and reason not in ALLOWED_SKIPS:
        _refused[report.nodeid] = reason


# tryfirst: the reports of xdist's workers pass here too, in the process that decides the exit status.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report):
    _note(report)


@pytest.hookimpl(tryfirst=True)
def pytest_collectreport(report):
    _note(report)


def pytest_sessionstart(session):
    _refused.clear()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    if _refused and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if not _refused:
        return
    terminalreporter.section("skipped without an allowed reason: the run fails", red=True)
    for nodeid, reason in _refused.items():
        terminalreporter.write_line(f"{nodeid}: {reason!r} (allowed: {', '.join(ALLOWED_SKIPS)})")
