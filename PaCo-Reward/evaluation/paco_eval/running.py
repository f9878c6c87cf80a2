"""What the benchmarks' command lines share: scoring into a results file, and the exit status."""

import sys
from collections.abc import Callable, Sequence

from paco_eval.engines import Engine
from paco_eval.errors import BenchError, ItemError
from paco_eval.progress import Progress
from paco_eval.results import ResultsFile
from paco_eval.scoring import Item, Prepared, results_of


def score_missing(
    items: Sequence[Item],
    results: ResultsFile,
    key_of: Callable[[Item], tuple],
    prepare: Callable[[Item], Prepared],
    engine_of: Callable[[], tuple[str, Engine]],
    batch_size: int,
) -> list[Item]:
    """Append the results of all items that have none; returns those that stay without, each named on stderr.

    Args:
        items: with a `name` (what messages call it).
        engine_of: makes the engine and says its name; not called where nothing is left to do.

    Raises:
        BenchError: from the engine.
    """
    todo = [item for item in items if key_of(item) not in results.done]
    if not todo:
        return []
    engine_name, engine = engine_of()
    failed = []
    with Progress(len(items), len(results.done), "item") as progress:
        for item, row in results_of(todo, prepare, engine, batch_size):
            if isinstance(row, ItemError):
                failed.append(item)
                progress.say(f"{item.name}: {row}")
            else:
                results.append({"engine": engine_name, **row})
            progress.step(scored=not isinstance(row, ItemError))
    return failed


def exit_status(run: Callable[[], int]) -> int:
    """Of a command whose `run` returns the number of items without a result.

    0: every item has one. 1: some have none. 2: the run could not go on, said on stderr. 130: stopped by Ctrl-C.
    """
    try:
        return 1 if run() else 0
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        return 130
    except (BenchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
    return 2
