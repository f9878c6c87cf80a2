"""Single files of models and adapters on the hub, with one error message for each way to fail."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import errors, hf_hub_download, snapshot_download

from paco_grpo.policies.base import PolicyLoadError

# huggingface_hub speaks HTTP through httpx, or since its version 2 through httpx2.
HTTP_ERRORS = tuple(
    importlib.import_module(name).HTTPError for name in ("httpx", "httpx2") if importlib.util.find_spec(name)
)


class NoSuchFile(PolicyLoadError):
    """The hub has the repository, but not the file."""


def looks_like_a_path(name: str) -> bool:
    """Whether ``name`` cannot be a hub name (owner/name), so that it was meant as a folder."""
    return name.startswith((".", "/", "~")) or name.count("/") != 1 or "\\" in name


def hub_file(name: str, file: str, cached_only: bool = False) -> Path:
    """``file`` of the hub repository ``name``, from the local cache or (unless ``cached_only``) downloaded into it.

    Raises:
        NoSuchFile: The repository does not have it.
        PolicyLoadError: The hub cannot be reached, or has no such repository for this user.
    """
    with _explained(name, file):
        return Path(hf_hub_download(name, file, local_files_only=cached_only))


def hub_folder(name: str, folder: str) -> Path:
    """A local copy of the hub repository ``name`` in which ``folder`` is complete, from the cache or downloaded.

    Raises:
        PolicyLoadError: The hub cannot be reached, or has no such repository for this user.
    """
    with _explained(name, folder):
        return Path(snapshot_download(name, allow_patterns=f"{folder}/*"))


@contextmanager
def _explained(name: str, file: str) -> Iterator[None]:
    remedy = f"There is no local folder {Path(name).absolute()} either."
    try:
        yield
    except (
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        ConnectionError,
    ) as error:
        raise PolicyLoadError(
            f"cannot reach the model hub for {name!r}, and it is not in the local cache ({type(error).__name__}). "
            f"{remedy} Check the network, or download it elsewhere and give its folder."
        ) from error
    except errors.GatedRepoError as error:
        raise PolicyLoadError(
            f"{name!r} on the hub is gated: accept its license there, then log in with `hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise PolicyLoadError(f"the hub has no {name!r} that you may read. {remedy} Check the name.") from error
    except errors.EntryNotFoundError as error:
        raise NoSuchFile(f"{name!r} on the hub has no {file}") from error
    except (errors.HfHubHTTPError, *HTTP_ERRORS) as error:
        raise PolicyLoadError(f"the model hub fails for {name!r} ({error}). {remedy} Try again later.") from error
