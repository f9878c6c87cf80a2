"""A skipped test fails the run unless its reason is allowed: with one process and with xdist's workers."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
CONFTEST = Path(__file__).resolve().parents[2] / "conftest.py"
# Several cases to a run: starting pytest is what takes the time.
ALLOWED = """
import pytest
def test_ok(): pass
@pytest.mark.parametrize("reason", ["no GPU", "shared/data absent", "vLLM environment not installed", "DeepSpeed not installed"])
def test_skips(reason): pytest.skip(reason)
@pytest.mark.skipif(True, reason="no GPU")
def test_gpu(): pass
@pytest.mark.xfail(strict=True)
def test_known(): assert False
"""
REFUSED = """
import pytest
def test_ok(): pass
@pytest.mark.parametrize("reason", ["feeling tired", "no GPU today"])
def test_skips(reason): pytest.skip(reason)
"""
MODULE = "import pytest\nmissing = pytest.importorskip('no_such_module')\ndef test_a(): pass\n"
workers = pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "xdist"])


def outcome(pytester, *arguments: str, **sources: str):
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(**sources)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:hypothesispytest", *arguments)


@workers
def test_allowed_reasons_and_expected_failures_pass(pytester, workers):
    result = outcome(pytester, *workers, test_allowed=ALLOWED)
    assert result.ret == 0
    result.assert_outcomes(passed=1, skipped=5, xfailed=1)
    assert "without an allowed reason" not in result.stdout.str()


@workers
def test_any_other_reason_fails_and_is_named(pytester, workers):
    result = outcome(pytester, *workers, test_refused=REFUSED, test_module=MODULE)
    assert result.ret == 1
    summary = result.stdout.str().split("without an allowed reason")[1]
    for part in ("'feeling tired'", "'no GPU today'", "no_such_module", "allowed: no GPU, shared/data absent"):
        assert part in summary


def test_failures_still_fail(pytester):
    assert outcome(pytester, test_bad="def test_bad(): assert False\n").ret == 1
