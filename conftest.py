"""Rules for every test of the repository: a test that is skipped for a reason that is not allowed fails.

Thread counts are fixed before torch is imported: `test.sh` runs two workers on (at least) two cores.
"""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ALLOWED_SKIPS = (
    "no GPU", "shared/data absent", "shared/guides absent", "vLLM environment not installed",
    "chromium and chromedriver are not installed",
)  # fmt: skip


def _fail_unless_allowed(report):
    if report.skipped and not hasattr(report, "wasxfail"):
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = text.removeprefix("Skipped: ").strip()
        if reason not in ALLOWED_SKIPS:
            report.outcome = "failed"
            report.longrepr = f"skipped without an allowed reason: {reason!r} (allowed: {', '.join(ALLOWED_SKIPS)})"
    return report


# tryfirst: outside pytest's own wrappers, which turn marks into skips and expected failures.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport():
    return _fail_unless_allowed((yield))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report():
    return _fail_unless_allowed((yield))
