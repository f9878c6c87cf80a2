"""Bringing all images of an item to one process, for rewards that compare them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image

from paco_grpo.item import Item

_SENT_AT_ONCE = 16  # images of each process: all of an epoch need not fit into one process's memory


@dataclass
class ItemImages:
    """All images of one item."""

    item: Item
    positions: list[int]  # of the images in the epoch
    images: list[Image.Image]


def exchange_images(
    accelerator: Accelerator, local: Mapping[int, tuple[Image.Image, Item]], total: int
) -> Iterator[ItemImages]:
    """The items that this process owns; a collective operation.

    Args:
        accelerator: The processes.
        local: Position of each image of this process → image and item. Process r of P has the
            positions r, r + P, …
        total: Number of positions over all processes.
    """
    process = accelerator.process_index
    processes = accelerator.num_processes
    local_ids = [(position, item.item_id) for position, (_, item) in local.items()]
    positions_of: dict[int, list[int]] = {}
    for position, item_id in sorted(gather_object(local_ids)):
        positions_of.setdefault(item_id, []).append(position)
    # A process with an image of the item scores it: it has the item itself, which need not survive
    # pickling.
    owner_of = {}
    for positions in positions_of.values():
        owner_of |= dict.fromkeys(positions, positions[0] % processes)

    images = {}
    for position, (image, _) in local.items():
        if owner_of[position] == process:
            images[position] = image
    stride = _SENT_AT_ONCE * processes
    for start in range(0, total, stride):
        sent = []
        for position in range(start, start + stride):
            if position in local and owner_of[position] != process:
                sent.append((position, local[position][0]))
        for position, image in gather_object(sent):
            if owner_of[position] == process:
                images[position] = image

    for positions in positions_of.values():
        if owner_of[positions[0]] != process:
            continue
        _, item = next(local[position] for position in positions if position in local)
        yield ItemImages(item, positions, [images[position] for position in positions])
