"""What all tests share: thread counts, fixed before torch is imported, and Ctrl-C."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # `test.sh` runs two workers
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell starts `bash test.sh &` with SIGINT ignored, and the programs that the tests interrupt
# would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
