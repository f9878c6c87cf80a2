"""Reference images are decoded once: what is remembered, and how the wait for it ends."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_run import write_edits

from paco_grpo.data.prompts import load_prompts
from paco_grpo.distributed import Stopped
from paco_grpo.training.references import References

ALONE = SimpleNamespace(is_main_process=True, num_processes=1, process_index=0)


def read_all(folder, items):
    """Names of the files that a start decodes."""
    references = References(items, folder, ALONE)
    references.check_headers()
    decoded = [references.images[number].file.name for number in references._pending]
    references.finish(lambda: False)
    references.close()
    return decoded


def test_only_what_has_changed_is_decoded_again(tmp_path):
    prompts = write_edits(tmp_path, references=2)
    images = [{"bytes": (prompts / f"test{number}.png").read_bytes()} for number in range(3)]
    table = prompts / "train.parquet"
    pq.write_table(pa.table({"prompt": list("abc"), "image": images}), table)
    items = load_prompts(prompts, "train", "geneval_image")
    items += load_prompts(prompts, "train", "arrow_editing")
    files = [f"train{number}.png" for number in range(4)]
    assert sorted(read_all(tmp_path, items)) == [table.name] * 3 + files
    assert read_all(tmp_path, items) == []
    (prompts / "train2.png").write_bytes((prompts / "train3.png").read_bytes())
    assert read_all(tmp_path, items) == ["train2.png"]
    pq.write_table(pa.table({"prompt": list("abc"), "image": images[::-1]}), table)
    assert read_all(tmp_path, items) == [table.name] * 3


def test_a_signal_ends_the_wait(tmp_path):
    items = load_prompts(write_edits(tmp_path), "test", "geneval_image")
    references = References(items, tmp_path, ALONE)
    references.check_headers()
    go_on = threading.Event()
    slow = replace(references.images[1], content=lambda: go_on.wait() and references.images[0].file)
    references.images[1] = slow
    references.start()
    with pytest.raises(Stopped):
        references.finish(lambda: True)
    go_on.set()
    references.finish(lambda: False)
    references.close()
    assert read_all(tmp_path, items) == []
