"""Data sets of edits from the hub or from disk.

Images stay undecoded until they are asked for, so that a broken one affects only its row.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from paco_eval.benchmark import Row
from paco_judge.errors import UserError
from paco_judge.files import read_json_lines
from paco_judge.images import UnreadableImage, read_image


class EditRows:
    """The rows of a data set, and their images: one before the edit, and two edits of it.

    Args:
        dataset: Hub name, folder of ``save_to_disk`` or of parquet files, or a .jsonl file, to
            which image paths are relative. Default: the folder named as the data set in ., .. or
            ../.., else the hub's ``hub_name``.
        hub_name: ``OWNER/NAME``.
        texts: Columns that are needed.
        before: Column of the image before the edit.
        after: Column of the two edits.

    Raises:
        UserError: The data set is missing, not readable, or lacks a column.
    """

    def __init__(
        self, dataset: str | None, hub_name: str, texts: Sequence[str], before: str, after: str
    ) -> None:
        self.rows: list[Row]
        self._before = before
        self._after = after
        self._stored: Callable[[int], Row]
        path = Path(dataset or _local_copy(hub_name) or hub_name).expanduser()
        self._root = path.parent if path.is_file() else path
        if path.suffix == ".jsonl":
            self.rows = read_json_lines(path)
            self._stored = self.rows.__getitem__
            columns = set().union(*self.rows)
        else:
            loaded = _load(path, hub_name)
            columns = set(loaded.column_names)
            undecoded = loaded.with_format("arrow")
            available = [name for name in texts if name in columns]
            self.rows = undecoded.select_columns(available)[:].to_pylist()
            self._stored = lambda index: undecoded[index].to_pylist()[0]
        missing = [column for column in (*texts, before, after) if column not in columns]
        if missing:
            raise UserError(
                f"dataset {path} lacks the columns {', '.join(missing)}; "
                f"it has {', '.join(sorted(columns))}"
            )

    def images(self, index: int) -> list[Image.Image]:
        """The image before the edit and the two edits, RGB.

        Raises:
            ValueError: One cannot be read; the message names its column.
            KeyError: The row lacks a column.
        """
        row = self._stored(index)
        before = row[self._before]
        edits = row[self._after]
        if not isinstance(edits, list) or len(edits) != 2:
            raise ValueError(f"{self._after} must hold 2 images")
        images = [self._open(before, self._before)]
        for number, edit in enumerate(edits):
            images.append(self._open(edit, f"{self._after}[{number}]"))
        return images

    def _open(self, stored: Any, column: str) -> Image.Image:
        """The image of a cell: a path relative to the data set, bytes, or a dict with either."""
        if isinstance(stored, dict):
            stored = stored.get("bytes") or stored.get("path")
        if not isinstance(stored, (bytes, str)) or not stored:
            raise ValueError(f"{column} holds no image but {stored!r}")
        is_path = isinstance(stored, str)
        try:
            return read_image(self._root / stored if is_path else stored)
        except UnreadableImage as error:
            place = f"{column} {stored if is_path else ''}"
            raise ValueError(f"image {place} {error}") from error


def _local_copy(hub_name: str) -> Path | None:
    """The folder named as the data set in ., .. or ../... None: there is none.

    The folder of a benchmark's code may have that name; it counts if the data were downloaded to
    it.
    """
    for place in (".", "..", "../.."):
        folder = Path(place) / hub_name.partition("/")[2]
        is_code = (folder / "evaluation.py").is_file() and not (folder / "data").is_dir()
        if folder.is_dir() and not is_code:
            return folder
    return None


def _load(path: Path, hub_name: str) -> Any:
    """A data set of the package ``datasets``: the split train, or without one all splits."""
    import datasets

    try:
        is_saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
        load = datasets.load_from_disk if is_saved else datasets.load_dataset
        loaded = load(str(path))
    except Exception as error:  # hub, network, cache and format errors share no base class
        local_name = hub_name.partition("/")[2]
        raise UserError(
            f"dataset {path} cannot be read: {str(error).partition(chr(10))[0]}; download it with "
            f"`hf download {hub_name} --repo-type dataset --local-dir {local_name}` "
            "(HF_ENDPOINT: a mirror)"
        ) from error
    if not isinstance(loaded, dict):
        return loaded
    if "train" in loaded:
        return loaded["train"]
    return datasets.concatenate_datasets(list(loaded.values()))
