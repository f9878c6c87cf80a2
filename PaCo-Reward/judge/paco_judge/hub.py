"""Weights that cannot be had: what is wrong and what to do, from the error of whichever library.

with explain_missing(name):
    model = AutoModel.from_pretrained(name)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paco_judge.errors import UserError

_REMEDY = (
    ". Download them once with `hf download {0}` (if they are gated, first accept their license at "
    "https://huggingface.co/{0} and run `hf auth login`), or give a local folder. HF_ENDPOINT names "
    "a mirror of the hub, HF_HOME the folder of its cache."
)
_ABSENT = "they are not in the cache, and the hub cannot be reached" + _REMEDY


@contextmanager
def explain_missing(name: str | Path) -> Iterator[None]:
    """Say in one message why the weights ``name`` are neither in a folder, cached, nor on the hub.

    Errors about a folder that exists stay as they are.

    Raises:
        UserError: What is wrong, and what to do.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, UserError) or Path(name).expanduser().is_dir():
            raise
        problem = _problem_of(error)
        if problem is None:
            raise
        raise UserError(f"the weights {name} are not available: {problem.format(name)}") from error


def _problem_of(error: BaseException | None) -> str | None:
    """What the hub's client said, at whatever depth of causes; None: it said nothing."""
    import httpx
    from huggingface_hub import errors

    problems = {
        errors.HFValidationError: "this is neither an existing folder nor a name on the hub, such "
        "as organization/model",
        errors.GatedRepoError: "they are gated, and the hub does not know that you accepted their "
        "license" + _REMEDY,
        errors.RepositoryNotFoundError: "there is no such folder, and the hub has no such model or "
        "hides it" + _REMEDY,
        errors.OfflineModeIsEnabled: "they are not in the cache, and HF_HUB_OFFLINE forbids to ask "
        "the hub" + _REMEDY,
        errors.LocalEntryNotFoundError: _ABSENT,
        errors.EntryNotFoundError: "the hub's repository lacks a file" + _REMEDY,
        httpx.HTTPError: _ABSENT,
    }
    chain = []
    while error is not None:
        chain.append(error)
        error = error.__cause__ or error.__context__
    for kind, problem in problems.items():
        if any(isinstance(link, kind) for link in chain):
            return problem
    return None
