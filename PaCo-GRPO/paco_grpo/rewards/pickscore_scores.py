"""Download the weights of pickscore: ``python paco_grpo/rewards/pickscore_scores.py``."""

import sys

if __name__ == "__main__":
    if sys.argv[1:]:
        print(__doc__)
        sys.exit(0 if sys.argv[1] in ("-h", "--help") else 2)
    del sys.path[0]  # this folder, whose modules would hide the standard library's
    from paco_grpo.rewards.clip import PickScore
    from paco_judge.errors import run_command

    def download() -> None:
        PickScore().load()
        print("the weights are in the cache")

    sys.exit(run_command(download))
