"""The table of ConsistencyRank-Bench: see paco_eval/rank.py."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from paco_eval import start

    sys.exit(start("rank", "table_main"))
