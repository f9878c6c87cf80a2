"""Functions by name: ``package.module:name``, or ``file.py:name``; near names.

Imports nothing of other packages, because reward services have only their own.
"""

import difflib
import importlib.util
import inspect
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any


def without_keys(value: Any) -> Any:
    """``value`` without the arguments ``api_key`` in its tables: what may be written to a file."""
    if isinstance(value, Mapping):
        return {key: without_keys(entry) for key, entry in value.items() if key != "api_key"}
    if isinstance(value, list | tuple):
        return [without_keys(entry) for entry in value]
    return value


def find_function(place: str, known: Sequence[str] = ()) -> Any:
    """What is at ``place``. Raises ValueError: nothing is; ``known`` are names to suggest."""
    module, colon, name = place.rpartition(":")
    if not colon:
        names = ", ".join([*known, "package.module:name", "file.py:name"])
        raise ValueError(f"{place!r} is unknown.{did_you_mean(place, known)} Known: {names}")
    file = str(Path(module).expanduser())
    try:
        if file.lower().endswith(".py"):
            found = runpy.run_path(file)[name]
        else:
            found = getattr(importlib.import_module(module), name)
    # Anything that the code raises, and sys.exit, which would end the run without a message.
    except (Exception, SystemExit) as error:
        raise ValueError(f"{place!r} cannot be imported: {in_words(error, file)}") from error
    if callable(found):
        return found
    raise ValueError(f"{place!r} is no function, but {found!r}")


def source_of(place: str) -> str | None:
    """The file of what is at ``place``, as for ``find_function``; None where it has none."""
    module = place.rpartition(":")[0]
    if module.lower().endswith(".py"):
        return module
    spec = importlib.util.find_spec(module)
    return spec.origin if spec else None


def in_words(error: BaseException, file: str) -> str:
    """The error, and the line of ``file``, or of a module that it imports, which raised it."""
    text = f"{type(error).__name__}: {error}"  # a SyntaxError names its line itself
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == file or frame.name == "<module>":
            return f"{text} ({frame.filename}, line {frame.lineno})"
    return text


def place_of(function: Callable[..., object]) -> str:
    """Where ``find_function`` finds a function again. Raises ValueError for one inside another."""
    name = getattr(function, "__qualname__", "")
    module = getattr(function, "__module__", None) or ""
    is_class = isinstance(function, type)
    in_module = getattr(sys.modules.get(module), name, None) is function and not is_class
    # A configuration file is loaded by its path, so its module cannot be imported by name.
    if in_module and PathFinder.find_spec(module.partition(".")[0]):
        return f"{module}:{name}"
    if inspect.isfunction(function) and name.isidentifier():
        return f"{Path(function.__code__.co_filename).resolve()}:{name}"
    raise ValueError(
        f"{name or function!r}, which a saved run could not find again: give a function at the top "
        "level of the configuration file or of an importable module"
    )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error message: ``" Did you mean 'x'?"``, or nothing if no name is close."""
    by_lower_case = {name.lower(): name for name in known}
    nearest = difflib.get_close_matches(word.lower(), by_lower_case, n=1)
    return f" Did you mean {by_lower_case[nearest[0]]!r}?" if nearest else ""
