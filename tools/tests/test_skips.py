"""A test or module that is skipped without an allowed reason fails, also with xdist's workers."""

from pathlib import Path

pytest_plugins = ["pytester"]
CONFTEST = Path(__file__).resolve().parents[2] / "conftest.py"
SKIPS = """
import pytest
def test_ok(): pass
@pytest.mark.parametrize("reason", ["no GPU", "shared/data absent", "feeling tired", "no GPU today"])
def test_skips(reason): pytest.skip(reason)
@pytest.mark.skipif(True, reason="no GPU")
def test_gpu(): pass
@pytest.mark.xfail(strict=True)
def test_known(): assert False
"""
MODULE = "import pytest\nmissing = pytest.importorskip('no_such_module')\ndef test_a(): pass\n"


def test_only_allowed_reasons_pass(pytester):
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(test_skips=SKIPS, test_module=MODULE)
    options = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "--continue-on-collection-errors")
    result = pytester.runpytest_subprocess(*options, "-n", "2")
    assert result.ret == 1
    result.assert_outcomes(passed=1, skipped=3, xfailed=1, failed=2, errors=1)
    for part in ("'feeling tired'", "'no GPU today'", "no_such_module"):
        assert part in result.stdout.str()
