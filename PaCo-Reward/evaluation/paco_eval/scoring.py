"""Items into results: their pairs are gathered into batches, scored, and given back item by item."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from paco_eval.engines import Engine
from paco_eval.errors import BenchError, ItemError
from paco_judge.client import Pair
from paco_judge.verdict import Verdict

Item = TypeVar("Item")
# An item's pairs, and what makes its row from their scores (in the same order).
Prepared = tuple[list[Pair], Callable[[list[float]], dict]]
GIVE_UP_AFTER = 16  # engine failures without a success between them: it is the engine, not the items


def results_of(
    items: Sequence[Item], prepare: Callable[[Item], Prepared], engine: Engine, batch_size: int
) -> Iterator[tuple[Item, dict | ItemError]]:
    """Every item with its row, or with what is wrong with it.

    Items are gathered until they hold `batch_size` pairs, which the engine gets at once. Where the engine fails on a
    batch, each of its items is tried alone.

    Raises:
        BenchError: from the engine, or when it failed on `GIVE_UP_AFTER` items in a row.
    """
    gathered: list[tuple[Item, Prepared]] = []
    crashes = 0
    for position, item in enumerate(items):
        try:
            gathered.append((item, prepare(item)))
        except ItemError as error:
            yield item, error
        full = sum(len(pairs) for _, (pairs, _) in gathered) >= batch_size or position == len(items) - 1
        if not full or not gathered:
            continue
        for (one, (_, finish)), verdicts in zip(gathered, _verdicts([p for _, (p, _) in gathered], engine)):
            crashes = crashes + 1 if isinstance(verdicts, Exception) else 0
            yield one, _row(verdicts, finish)
            if crashes >= GIVE_UP_AFTER:
                raise BenchError(
                    f"the engine failed on {crashes} items in a row, the last time with: {_said(verdicts)}"
                )
        gathered = []


def _verdicts(batch: list[list[Pair]], engine: Engine) -> Iterator[list[Verdict] | Exception]:
    """The verdicts of each item's pairs, or the exception that they cause."""
    try:
        verdicts = iter(engine([pair for pairs in batch for pair in pairs]))
    except BenchError:
        raise
    except Exception as error:  # noqa: BLE001 - a model or processor may dislike an image in any way: that is one item
        if len(batch) == 1:
            yield error
            return
        for pairs in batch:
            yield from _verdicts([pairs], engine)
        return
    for pairs in batch:
        yield [next(verdicts) for _ in pairs]


def _row(verdicts: list[Verdict] | Exception, finish: Callable[[list[float]], dict]) -> dict | ItemError:
    if isinstance(verdicts, Exception):
        return ItemError(f"the engine failed: {_said(verdicts)}")
    bad = next((verdict.error for verdict in verdicts if not verdict.ok), None)
    return ItemError(bad) if bad is not None else finish([verdict.p_yes for verdict in verdicts])


def _said(error: Exception) -> str:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{type(error).__name__}: {first}"
