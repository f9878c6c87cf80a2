"""The judge on ConsistencyRank: eval.py by its published name.

python eval_vllm.py --model X --tensor_parallel_size 1 --gpu_memory_utilization 0.85 --batch_size 8
"""

import sys

from eval import main

if __name__ == "__main__":
    sys.exit(main())
