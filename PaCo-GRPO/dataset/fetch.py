"""Fetch a public prompt set and convert it to ours.

    python dataset/fetch.py NAME [--output FOLDER] [--source FOLDER] [--limit N] [--open_twins]

NAME is one of t2is, gedit, sharegpt-4o-image, pickscore, ocr. --source is a folder with the set as published, if it was
downloaded before. The output is written completely or not at all, and is read once as a run would read it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import converters

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class PublicSet:
    """Where a set is published and how it is converted."""

    kind: str  # config.prompt_fn of the result
    convert: Callable[..., None]  # (source, out, test_share=, language=, limit=)
    hub: str = ""  # data set on the Hugging Face hub; empty: the files at ``urls``
    patterns: tuple[str, ...] = ()  # its files that are needed
    urls: tuple[str, ...] = ()
    splits: tuple[str, ...] = ("train", "test")


_FLOW_GRPO = "https://raw.githubusercontent.com/yifan123/flow_grpo/main/dataset/ocr/"
_SHAREGPT = "FreedomIntelligence/ShareGPT-4o-Image"
SETS = {
    "t2is": PublicSet("geneval", converters.t2is, "ChengyouJia/T2IS-Bench", ("*.jsonl",)),
    "gedit": PublicSet("geneval_image", converters.gedit, "stepfun-ai/GEdit-Bench", ("*.parquet",), splits=("test",)),
    "sharegpt-4o-image": PublicSet(
        "arrow_editing", converters.sharegpt_4o_image, _SHAREGPT, ("text_and_image_to_image*",)
    ),
    "pickscore": PublicSet("general_ocr", converters.pickscore, "yuvalkirstain/pickapic_v1_no_images", ("*.parquet",)),
    "ocr": PublicSet("general_ocr", converters.ocr, urls=(f"{_FLOW_GRPO}train.txt", f"{_FLOW_GRPO}test.txt")),
}


class FetchError(RuntimeError):
    """A set that cannot be downloaded or converted; the message says what to do."""


def download(public: PublicSet, name: str) -> Path:
    """Folder with the set as published.

    Raises:
        FetchError: It cannot be downloaded; the message says how to download it on another machine.
    """
    try:
        if public.hub:
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(public.hub, repo_type="dataset", allow_patterns=list(public.patterns)))
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        for url in public.urls:
            with urllib.request.urlopen(url, timeout=60) as answer:
                (folder / url.rpartition("/")[2]).write_bytes(answer.read())
        return folder
    except (OSError, ValueError, RuntimeError, ImportError, urllib.error.URLError) as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        command = "; ".join(f"curl -O {url}" for url in public.urls)
        if public.hub:
            command = f"hf download {public.hub} --repo-type dataset --local-dir FOLDER"
        raise FetchError(
            f"{name} cannot be downloaded from here: {cause}\nOn a machine that can: {command}\n"
            f"then here: python dataset/fetch.py {name} --source FOLDER"
        ) from error


def convert(public: PublicSet, source: Path, output: Path, options: argparse.Namespace) -> dict[str, int]:
    """Write the converted set to ``output``; returns the number of items of each split.

    Raises:
        FetchError: ``output`` is not empty, or the set is not in the form we know.
    """
    from paco_grpo.data.prompts import load_prompts  # imports torch

    if output.exists() and any(output.iterdir()):
        raise FetchError(f"{output} is not empty; give another folder with --output, or remove it")
    output.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        chosen = {name: getattr(options, name) for name in ("test_share", "language", "limit", "open_twins")}
        public.convert(source, scratch, **chosen)
        counts = {split: len(load_prompts(scratch, split, public.kind)) for split in public.splits}
        if output.exists():
            output.rmdir()
        scratch.chmod(0o755)
        scratch.rename(output)
    except Exception as error:  # damaged files, other columns
        raise FetchError(f"{source} cannot be converted ({type(error).__name__}: {error})") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return counts


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 1 with one message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(SETS))
    parser.add_argument("--output", type=Path, help="default: dataset/public-NAME")
    parser.add_argument("--source", type=Path, help="folder of the set as published (no download)")
    parser.add_argument("--limit", type=int, help="at most so many items of a split (ShareGPT-4o-Image: of the set)")
    parser.add_argument("--language", default="en", choices=["en", "cn"], help="of GEdit-Bench's instructions")
    parser.add_argument("--test-share", type=float, default=0.1, help="of sets without a test split")
    parser.add_argument("--open_twins", action="store_true", help="T2IS: each prompt also without its shared description")
    options = parser.parse_args(arguments)
    public, output = SETS[options.name], options.output or HERE / f"public-{options.name}"
    try:
        if options.source is not None and not options.source.is_dir():
            raise FetchError(f"--source {options.source} is not a folder")
        source = options.source or download(public, options.name)
        counts = convert(public, source, output, options)
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    listed = ", ".join(f"{count} {split}" for split, count in counts.items())
    print(f"{output}: {listed} items; use it with --config.dataset={output} --config.prompt_fn={public.kind}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
