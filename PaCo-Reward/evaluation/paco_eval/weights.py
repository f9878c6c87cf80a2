"""What tells two judges of one name apart: a hash of their configuration and weights."""

import hashlib
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FILES = (".json", ".jinja", ".txt", ".model", ".safetensors", ".bin", ".pth", ".pt", ".tar")
_LONG = 10**9  # bytes: a second or more


def fingerprint(folders: Iterable[str | Path | None]) -> str | None:
    """``sha256:…`` of the content of all files of models and adapters, wherever they lie; None if none is found.

    All bytes are read, several files at a time: sampling would miss a change of a few tensors, and the engine reads
    the same files next (from memory then).

    Args:
        folders: Folders (without their subfolders: training keeps other checkpoints there), single files, or hub names,
            of which the files in the local cache count.
    """
    files = [file for folder in folders if folder is not None for file in _files(folder)]
    size = sum(file.stat().st_size for file in files)
    if size > _LONG:
        print(f"hashing {size / 1e9:.1f} GB of weights", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(4) as pool:  # hashing releases the GIL
        digests = list(pool.map(_digest, files))
    total = hashlib.sha256()
    for file, digest in zip(files, digests, strict=True):
        total.update(f"{file.name}\0{digest}\n".encode())
    return f"sha256:{total.hexdigest()[:32]}" if files else None


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _files(name: str | Path) -> list[Path]:
    path = Path(name)
    if path.is_file():
        return [path]
    if not path.is_dir():
        try:
            from huggingface_hub import try_to_load_from_cache

            cached = (try_to_load_from_cache(str(name), f"{kind}config.json") for kind in ("", "adapter_"))
            path = next((Path(file).parent for file in cached if isinstance(file, str)), None)
        except (ImportError, ValueError):  # ValueError: it cannot be a hub name
            path = None
    return sorted(file for file in path.iterdir() if file.suffix in FILES and file.is_file()) if path else []
