# ruff: noqa: N999  (a published name: users run this file)
"""Download the weights of subfig_clipT and subfig_clipI:
``python paco_grpo/rewards/subfig_clipT.py``.
"""

import sys

if __name__ == "__main__":
    if sys.argv[1:]:
        print(__doc__)
        sys.exit(0 if sys.argv[1] in ("-h", "--help") else 2)
    del sys.path[0]  # this folder, whose modules would hide the standard library's
    from paco_grpo.rewards.registry import build_rewards
    from paco_judge.errors import run_command

    def download() -> None:
        build_rewards({"subfig_clipT": 1.0})["subfig_clipT"].check()
        print("the weights are in the cache")

    sys.exit(run_command(download))
