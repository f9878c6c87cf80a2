"""What LLaMA-Factory reads: ShareGPT rows and dataset_info.json."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paco_reward.pairing.journal import write_atomically, write_json
from paco_reward.pairing.records import LabelledPair
from paco_reward.pairing.sources import IMAGE_TAG

_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}


def row(pair: LabelledPair) -> dict[str, Any]:
    """``<image><image>QUESTION`` and the answer; image paths are relative to the data set's folder."""
    return {
        "messages": [
            {"role": "user", "content": f"{IMAGE_TAG * 2}{pair.question}"},
            {"role": "assistant", "content": pair.answer},
        ],
        "images": [pair.first, pair.second],
    }


def write_datasets(output: Path, datasets: Mapping[str, Sequence[LabelledPair]]) -> None:
    """Write NAME.json for each data set that has pairs, and dataset_info.json with all of them."""
    info = {}
    for name, pairs in datasets.items():
        rows = ",\n".join(json.dumps(row(pair), ensure_ascii=False) for pair in pairs)
        write_atomically(output / f"{name}.json", f"[\n{rows}\n]\n".encode())
        info[name] = {
            "file_name": f"{name}.json",
            "formatting": "sharegpt",
            "columns": {"messages": "messages", "images": "images"},
            "tags": _TAGS,
        }
    write_json(output / "dataset_info.json", info)
