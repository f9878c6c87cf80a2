"""benchmarks/block_bytes.py: what it reads in Inductor's programs, and FLUX.1-dev's blocks."""

import re
import subprocess
import sys

import pytest
from tiny_run import ROOT

PROGRAM = """
triton_poi_add_0 = async_compile.triton('triton_poi_add_0', '''
    inductor_meta={'kernel_num_gb': 0.25, 'no_x_dim': False},
''', device_str='cuda')
triton_red_mul_1 = async_compile.triton('triton_red_mul_1', '''
    inductor_meta={'kernel_num_gb': 1.5e-05, 'no_x_dim': False},
''', device_str='cuda')

def call(args):
        triton_poi_add_0.run(arg0, buf0, stream=stream0)
        extern_kernels.mm(buf0, arg1, out=buf1)
        triton_red_mul_1.run(buf1, stream=stream0)
        triton_poi_add_0.run(buf1, buf2, stream=stream0)
"""


def test_each_launch_counts():
    pytest.importorskip("triton")
    from block_bytes import triton_kernels

    launches, gigabytes = triton_kernels(PROGRAM)
    assert launches == 3
    assert gigabytes == pytest.approx(2 * 0.25 + 1.5e-05)


@pytest.mark.long
def test_blocks_move_fewer_bytes_with_shared_casts():
    """The figures of the page."""
    pytest.importorskip("triton")
    command = [sys.executable, "benchmarks/block_bytes.py", "t2is"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    page = (ROOT.parent / "docs" / "scaling.md").read_text()
    for kind in ("FluxTransformerBlock", "FluxSingleTransformerBlock"):
        (before, after) = re.search(rf"t2is +{kind} .* ([\d.]+) -> ([\d.]+)", done.stdout).groups()
        assert float(after) < 0.9 * float(before)
        assert f"{before} → {after}" in page
