"""The name that a user probably meant. Imports nothing, because reward services have only their own packages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def suggest(word: str, known: Iterable[str]) -> str | None:
    """The known name closest to ``word``, or None if nothing is close.

    >>> suggest("train.lr", ["train.ema", "train.learning_rate"])
    'train.learning_rate'
    """
    return next(iter(suggestions(word, known)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error message: ``" Did you mean 'x'?"``, or nothing if no known name is close."""
    nearest = suggest(word, known)
    return f" Did you mean {nearest!r}?" if nearest else ""


def suggestions(word: str, known: Iterable[str]) -> list[str]:
    """Known names that are equally good guesses for ``word``, at most three, in the order of ``known``.

    The guesses are, in this order: the same name in other case; the same name in another group (``train.num_steps`` →
    ``sample.num_steps``); a name that ``word`` abbreviates (``lr`` → ``learning_rate``) or nearly spells, in the same
    group, then in any group.
    """
    names = list(known)
    group, last = _split(word)
    own_group = [name for name in names if _split(name)[0] == group]
    guesses = (
        [name for name in names if name.lower() == word.lower()]
        or [name for name in names if _letters(_split(name)[1]) == _letters(last)]
        or _abbreviated(last, own_group)
        or _misspelled(last, own_group)
        or _abbreviated(last, names)
        or _misspelled(last, names)
    )
    return sorted(guesses, key=lambda name: -difflib.SequenceMatcher(None, group, _split(name)[0]).ratio())[:3]


def _split(name: str) -> tuple[str, str]:
    """Group and last part of a dotted name; an import path (``package.module:factory``) is one name."""
    group, _, last = ("", "", name) if ":" in name else name.rpartition(".")
    return group, last


def _letters(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).lower()


def _misspelled(last: str, names: list[str]) -> list[str]:
    spellings = {}
    for name in names:
        spellings.setdefault(_split(name)[1].lower(), name)
    return [spellings[match] for match in difflib.get_close_matches(last.lower(), spellings, n=1, cutoff=0.7)]


def _abbreviated(short: str, names: list[str]) -> list[str]:
    """The names that ``short`` abbreviates with beginnings of successive words (``lr``, ``learn_rate``, ``eps``).

    An abbreviation of all words is better than one of the first words, which is better than one of later words.
    """
    short = _letters(short)
    ranks = {}
    for name in names if len(short) > 1 else ():
        words = [word for word in _split(name)[1].lower().split("_") if word]
        if _abbreviates(short, words, all_of_them=True):
            ranks[name] = 0
        elif any(_abbreviates(short, words[start:]) for start in range(len(words))):
            ranks[name] = 1 if _abbreviates(short, words) else 2
    return [name for name, rank in ranks.items() if rank == min(ranks.values())]


def _abbreviates(short: str, words: list[str], all_of_them: bool = False) -> bool:
    if not short or not words:
        return not short and not (all_of_them and words)
    beginnings = (n for n in range(1, len(words[0]) + 1) if short.startswith(words[0][:n]))
    return any(_abbreviates(short[n:], words[1:], all_of_them) for n in beginnings)
