"""What all tests share: thread counts, fixed before torch is imported, Ctrl-C, a real vocabulary."""

import os
import signal
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # `test.sh` runs two workers
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell starts `bash test.sh &` with SIGINT ignored, and the programs that the tests interrupt
# would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def qwen_tokenizer() -> Path:
    """Folder with Qwen's own tokenizer, of any size or generation; it is not in this repository."""
    folder = os.environ.get("PACO_QWEN_TOKENIZER")
    if not folder:
        pytest.skip("PACO_QWEN_TOKENIZER names no folder with Qwen's tokenizer.json")
    return Path(folder)
