"""Fetch a public prompt set and convert it to ours.

    python dataset/fetch.py NAME [--output FOLDER] [--source FOLDER] [--limit N] [--open_twins]

NAME is one of t2is, gedit, sharegpt-4o-image, pickscore, ocr. --source is a folder with the set as
published, if it was downloaded before. The output is written completely or not at all.

    python dataset/fetch.py questions --source CLONE [--output FOLDER]

writes the published judge's own questions to text files, from a clone of its repository.
"""

import argparse
import hashlib
import json
import re
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import snapshot_download
from published_questions import REPOSITORY, USE, write_questions

from paco_grpo.data.prompts import load_prompts
from paco_grpo.rewards.ocr import quoted_texts
from paco_judge.arguments import Parser
from paco_judge.errors import UserError, run_command
from paco_judge.files import read_json_lines, read_text, write_json_lines
from paco_judge.grid import split_prompt
from paco_judge.images import read_image

_FLOW_GRPO = "https://raw.githubusercontent.com/yifan123/flow_grpo/main"
_PIECE = 64  # rows of a table in memory
QUESTIONS = "questions"
_TEST_SHARE = 0.1  # of sets without a test split


def t2is(source: Path, out: Path, *, limit: int | None, open_twins: bool) -> None:
    """T2IS prompts: JSON lines with ``prompt``, ``theme``, ``criteria`` … → ``geneval``.

    A set in one file is divided by theme, so that train and test share none. Files named by split,
    as the published trainer's, stay as they are. With ``open_twins`` each prompt is there
    twice: with ``"open": false``, and as ``open_twin`` makes it.
    """
    folders = sorted({file.parent.name for file in source.rglob("train*.jsonl")})
    if len(folders) > 1:
        raise UserError(
            f"it holds {len(folders)} prompt sets; give one of them: {', '.join(folders)}"
        )
    splits: dict[str, list[dict]] = {"train": [], "test": []}
    if all(any(source.rglob(f"{split}*.jsonl")) for split in splits):
        for split in splits:
            splits[split] = _json_rows(source, f"{split}*.jsonl")
    else:
        for row in _json_rows(source, "*.jsonl"):
            theme = str(row.get("theme") or row["prompt"])
            splits[_split_of(theme)].append(row)
    if open_twins:
        splits = {split: _with_open_twins(rows) for split, rows in splits.items()}
    for split, rows in splits.items():
        write_json_lines(out / f"{split}_metadata.jsonl", rows[:limit])


def _with_open_twins(rows: Iterable[dict]) -> list[dict]:
    """Each row, marked as not open, and its twin. Rows that are open already have none."""
    with_twins = []
    for row in rows:
        if row.get("open"):
            with_twins.append(row)
            continue
        with_twins.append({**row, "open": False})
        twin = open_twin(row)
        if twin is not None:
            with_twins.append(twin)
    return with_twins


def open_twin(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """A T2IS row without the description of what all panels share and its criteria of identity.

    It follows the theme's period without a space (dataset/README.md). A prompt without one has no
    twin: None.
    """
    prompt = str(row["prompt"])
    head = split_prompt(prompt).theme
    theme = re.match(r".*?[^.]\.(?=[^\s.])", head, re.DOTALL)
    if theme is None:
        return None
    twin = {**row, "prompt": theme[0] + prompt[len(head) :], "open": True}
    for name in ("idx", "category"):
        if row.get(name) is not None:
            twin[name] = f"{row[name]} (open)"
    if row.get("criteria"):
        twin["criteria"] = dict(row["criteria"])
        twin["criteria"].pop("Identity", None)
    return twin


def gedit(source: Path, out: Path, *, limit: int | None, **_) -> None:
    """GEdit-Bench, as published in Parquet files → ``geneval_image``, all in the test split."""
    rows = []
    (out / "images").mkdir()
    for row in _parquet_rows(source, "*.parquet"):
        if row["instruction_language"] != "en":
            continue
        if len(rows) == limit:
            break
        key = str(row["key"])
        # The number keeps keys apart that differ only in what a file name cannot hold.
        name = f"images/{len(rows):05d}_{re.sub(r'[^A-Za-z0-9_-]', '_', key)[:80]}.png"
        image = row.get("input_image_raw") or row["input_image"]
        read_image(image["bytes"]).save(out / name)
        rows.append(
            {
                "prompt": row["instruction"],
                "image": name,
                "idx": row["key"],
                "category": row["task_type"],
            }
        )
    write_json_lines(out / "test_metadata.jsonl", rows)


def sharegpt_4o_image(source: Path, out: Path, *, limit: int | None, **_) -> None:
    """ShareGPT-4o-Image, editing half (``input_prompt``, ``input_image``) → ``arrow_editing``.

    Rows with several input images are left out. Images are files next to the JSON file, or in its
    tar archives. No picture is in both splits.
    """
    schema = pa.schema(
        {"prompt": pa.string(), "image": pa.struct({"bytes": pa.binary(), "path": pa.string()})}
    )
    read = _image_reader(source)
    edits = []
    for row in json.loads(_files(source, "text_and_image_to_image*.json")[0].read_bytes()):
        names = [row["input_image"]] if isinstance(row["input_image"], str) else row["input_image"]
        if len(names) == 1:
            edits.append((names[0], row["input_prompt"]))
    for split in ("train", "test"):
        chosen = [edit for edit in edits[:limit] if _split_of(edit[0]) == split]
        with pq.ParquetWriter(out / f"{split}.parquet", schema) as writer:
            for start in range(0, len(chosen), _PIECE):  # a large set is never in memory
                rows = []
                for name, prompt in chosen[start : start + _PIECE]:
                    rows.append({"prompt": prompt, "image": {"bytes": read(name), "path": None}})
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))


def _image_reader(folder: Path) -> Callable[[str], bytes]:
    """An image's name → its bytes."""
    members: dict[str, tuple[Path, tarfile.TarInfo]] = {}
    for archive in sorted(folder.rglob("*.tar")):
        with tarfile.open(archive) as tar:
            for member in tar:
                members[member.name.removeprefix("./")] = (archive, member)

    def read(name: str) -> bytes:
        for candidate in (name, f"text_and_image_to_image/{name}", Path(name).name):
            if (folder / candidate).is_file():
                return (folder / candidate).read_bytes()
            if candidate in members:
                archive, member = members[candidate]
                with tarfile.open(archive) as tar:
                    return tar.extractfile(member).read()
        raise UserError(f"image {name!r} is neither a file of {folder} nor in its archives")

    return read


def pickscore(source: Path, out: Path, *, limit: int | None, **_) -> None:
    """Pick-a-Pic → ``general_ocr`` lists, each caption once and in one split.

    The column is ``caption``, and files are named by split.
    """
    seen: set[str] = set()

    def new_captions(split: str) -> Iterator[str]:
        for row in _parquet_rows(source, f"{split}*.parquet", ["caption"]):
            caption = " ".join(str(row["caption"] or "").split())
            if caption and caption not in seen:
                seen.add(caption)
                yield caption

    for split in ("test", "train"):
        _write_lines(out / f"{split}.txt", new_captions(split), limit)


def ocr(source: Path, out: Path, *, limit: int | None, **_) -> None:
    """Flow-GRPO's OCR prompts → ``general_ocr``, only lines with a text in double quotes."""
    for split in ("train", "test"):
        quoted = {}  # each once, in order
        text = read_text(source / f"{split}.txt")
        for line in text.split("\n"):
            line = " ".join(line.split())
            if quoted_texts(line):
                quoted[line] = None
        _write_lines(out / f"{split}.txt", quoted, limit)


def _split_of(text: str) -> str:
    """``test`` or ``train``, by a hash: the same on every machine."""
    digest = hashlib.sha256(text.encode()).digest()[:8]
    return "test" if int.from_bytes(digest, "big") / 2**64 < _TEST_SHARE else "train"


def _parquet_rows(
    folder: Path, pattern: str, columns: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    for file in _files(folder, pattern):
        for batch in pq.ParquetFile(file).iter_batches(batch_size=_PIECE, columns=columns):
            yield from batch.to_pylist()


def _json_rows(folder: Path, pattern: str) -> list[dict[str, Any]]:
    rows = []
    for file in _files(folder, pattern):
        rows += read_json_lines(file)
    return rows


def _write_lines(file: Path, lines: Iterable[str], limit: int | None = None) -> None:
    file.write_text("".join(line + "\n" for line in islice(lines, limit)), encoding="utf-8")


def _files(folder: Path, pattern: str) -> list[Path]:
    files = sorted(folder.rglob(pattern))
    if not files:
        raise UserError(f"{folder} holds no {pattern}")
    return files


@dataclass(frozen=True)
class PublicSet:
    """A published prompt set, and how it becomes one of ours."""

    kind: str  # config.prompt_fn of the result
    convert: Callable[..., None]  # (folder as published, folder for our files, options)
    place: str  # a data set on the Hugging Face hub, or the address of a folder
    files: tuple[str, ...]  # patterns on the hub


SETS = {
    "t2is": PublicSet("geneval", t2is, "ChengyouJia/T2IS-Bench", ("*.jsonl",)),
    "gedit": PublicSet("geneval_image", gedit, "stepfun-ai/GEdit-Bench", ("*.parquet",)),
    "sharegpt-4o-image": PublicSet(
        "arrow_editing",
        sharegpt_4o_image,
        "FreedomIntelligence/ShareGPT-4o-Image",
        ("text_and_image_to_image*",),
    ),
    "pickscore": PublicSet(
        "general_ocr", pickscore, "yuvalkirstain/pickapic_v1_no_images", ("*.parquet",)
    ),
    "ocr": PublicSet("general_ocr", ocr, _FLOW_GRPO + "/dataset/ocr", ("train.txt", "test.txt")),
}


def download(public: PublicSet, name: str) -> Path:
    """Folder with the set as published. Raises UserError."""
    urls = []
    command = f"hf download {public.place} --repo-type dataset --local-dir FOLDER"
    if public.place.startswith("https:"):
        urls = [f"{public.place}/{file}" for file in public.files]
        command = "; ".join(f"curl -O {url}" for url in urls)
    try:
        if not urls:
            options = {"repo_type": "dataset", "allow_patterns": list(public.files)}
            return Path(snapshot_download(public.place, **options))
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        for url in urls:
            with urllib.request.urlopen(url, timeout=60) as answer:
                (folder / Path(url).name).write_bytes(answer.read())
        return folder
    except (OSError, ValueError) as error:
        raise UserError(
            f"{name} cannot be downloaded from here: {error}\nOn a machine that can: {command}\n"
            f"then here: python dataset/fetch.py {name} --source FOLDER"
        ) from error


def convert(
    public: PublicSet, source: Path, output: Path, options: argparse.Namespace
) -> dict[str, int]:
    """Number of items of each split, after reading them as a run would."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as folder:
        new = Path(folder, "set")
        new.mkdir()
        public.convert(source, new, limit=options.limit, open_twins=options.open_twins)
        counts = {}
        for split in ("train", "test"):
            if any(new.glob(f"{split}*")):
                counts[split] = len(load_prompts(new, split, public.kind))
        new.replace(output)  # an empty folder may be there
    return counts


def fetch(options: argparse.Namespace) -> None:
    """Download, convert and say how the set is used. Raises UserError."""
    output = options.output or Path(__file__).with_name(f"public-{options.name}")
    if output.exists() and any(output.iterdir()):
        raise UserError(f"{output} is not empty; give another folder with --output, or remove it")
    if options.name == QUESTIONS:
        fetch_questions(options.source, output)
        return
    public = SETS[options.name]
    counts = convert(public, options.source or download(public, options.name), output, options)
    listed = ", ".join(f"{count} {split}" for split, count in counts.items())
    print(
        f"{output}: {listed} items; "
        f"use it with --config.dataset={output} --config.prompt_fn={public.kind}"
    )


def fetch_questions(source: Path | None, output: Path) -> None:
    """Write the published judge's questions and say how they are used. Raises UserError."""
    if source is None:
        raise UserError(
            f"give a clone of the published repository (git clone {REPOSITORY}) with --source"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as folder:
        new = Path(folder, "questions")
        new.mkdir()
        names = write_questions(source, new)
        new.replace(output)
    print(f"{output}: {', '.join(names)}")
    print(USE.format(output.resolve()))


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 1 with one message."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*sorted(SETS), QUESTIONS])
    parser.add_argument("--output", type=Path, help="default: dataset/public-NAME")
    parser.add_argument(
        "--source", type=Path, help="folder of the set as published (no download), or the clone"
    )
    parser.add_argument(
        "--limit",
        type=int,
        help="at most so many items of a split (ShareGPT-4o-Image: of the set)",
    )
    parser.add_argument(
        "--open_twins",
        action="store_true",
        help="T2IS: each prompt also as an open one, without its shared description",
    )
    options = parser.parse_args(arguments)
    return run_command(partial(fetch, options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
