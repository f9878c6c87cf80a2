"""Weights by name: a folder, the hub's cache, or the hub, which is asked once and without retries.

    model = AutoModel.from_pretrained(name, **hub_options(name))

Needs huggingface_hub when it is called.
"""

from pathlib import Path


class MissingWeights(OSError):
    """Weights that are neither in a folder, nor in the hub's cache, nor to be had from the hub."""


def missing_weights(name: str | Path, problem: str) -> str:
    """The message of every command whose weights are missing: what is wrong, and what to do."""
    return (
        f"the weights {name} are not available: {problem}. Download them once with "
        f"`hf download {name}` (if they are gated, first accept their license at "
        f"https://huggingface.co/{name} and run `hf auth login`), or give a local folder. "
        "HF_ENDPOINT names a mirror of the hub, HF_HOME the folder of its cache."
    )


def hub_options(name: str | Path, file: str = "config.json") -> dict[str, bool]:
    """Options for ``from_pretrained`` or ``snapshot_download``: no waiting for an absent hub.

    ``local_files_only`` is True for a folder, and for cached weights while the hub cannot be
    reached: asked for files that are not cached, the hub's own client would retry for 23 seconds.

    Args:
        name: Folder, or name on the hub.
        file: One that the repository must have: ``model_index.json`` for a diffusers pipeline,
            ``adapter_config.json`` for an adapter.

    Raises:
        MissingWeights: With ``missing_weights`` as its message. Takes as long as one request.
    """
    import httpx
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.utils import validate_repo_id

    if Path(name).expanduser().is_dir():
        return {"local_files_only": True}
    try:
        validate_repo_id(str(name))
    except errors.HFValidationError as error:
        raise MissingWeights(
            f"{name} is neither an existing folder nor a name on the hub, such as "
            "organization/model"
        ) from error
    is_cached = isinstance(try_to_load_from_cache(str(name), file), str)
    try:
        get_hf_file_metadata(hf_hub_url(str(name), file))  # one HEAD request, 10 s at most
        return {"local_files_only": False}
    except errors.GatedRepoError:
        problem = "they are gated, and the hub does not know that you accepted their license"
    except errors.RepositoryNotFoundError:
        problem = "there is no such folder, and the hub has no such model or hides it"
    except errors.EntryNotFoundError:
        problem = f"the hub's repository has no {file}"
    except errors.OfflineModeIsEnabled:
        problem = "they are not in the cache, and HF_HUB_OFFLINE forbids to ask the hub"
    except (httpx.HTTPError, OSError) as error:
        problem = f"they are not in the cache, and the hub cannot be reached ({error})"
    if is_cached:
        return {"local_files_only": True}
    raise MissingWeights(missing_weights(name, problem))
