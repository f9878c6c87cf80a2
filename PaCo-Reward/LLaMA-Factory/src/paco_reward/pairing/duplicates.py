"""Images that show the same, and pairs that therefore say the same.

Two images are near-duplicates when their perceptual hashes (64 bits: signs of low DCT frequencies of the grey image,
library ``imagehash``) differ in at most ``bits`` bits *and* their 16 x 16 colour thumbnails differ by at most 6/255
root-mean-square. The hash alone knows no colour: a red and a blue ball would be one.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from paco_reward.images import open_image
from paco_reward.pairing.records import LabelledPair

THUMBNAIL = 16
LARGEST_RMS = 6.0


def fingerprint(file: Path) -> tuple[int, np.ndarray]:
    """The hash as a 64-bit number, and the thumbnail as float32 (768,) in [0, 255].

    Raises:
        PacoRewardError: unreadable; names the file.
    """
    import imagehash
    from PIL import Image

    image = open_image(file)
    bits = np.packbits(imagehash.phash(image).hash.ravel())
    small = image.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)
    return int.from_bytes(bits.tobytes(), "big"), np.asarray(small, dtype=np.float32).ravel()


def leaders(names: Iterable[str], root: Path, bits: int) -> dict[str, str]:
    """For each image the first one (by name) that it is a near-duplicate of; itself where there is none.

    Args:
        names: paths relative to ``root``.
        bits: largest distance of two near-duplicates, 0 to 64.
    """
    hashes = np.empty(256, dtype=np.uint64)
    thumbnails: list[np.ndarray] = []
    firsts: list[str] = []
    found: dict[str, str] = {}
    for name in sorted(set(names)):
        number, thumbnail = fingerprint(root / name)
        distances = np.bitwise_count(hashes[: len(firsts)] ^ np.uint64(number))
        match = next(
            (
                index
                for index in np.flatnonzero(distances <= bits)
                if np.sqrt(np.mean((thumbnails[index] - thumbnail) ** 2)) <= LARGEST_RMS
            ),
            None,
        )
        if match is not None:
            found[name] = firsts[match]
            continue
        if len(firsts) == len(hashes):
            hashes = np.concatenate([hashes, np.empty_like(hashes)])
        hashes[len(firsts)] = number
        firsts.append(name)
        thumbnails.append(thumbnail)
        found[name] = name
    return found


def without_duplicates(pairs: Sequence[LabelledPair], leader: dict[str, str], counts: Counter) -> list[LabelledPair]:
    """Pairs that show two different things and say something new; order is kept.

    A theme pair of two near-duplicates is left out (``near_duplicate``): a copy teaches nothing about consistency. An
    editing pair is not, since an edit may be small. A pair whose images are near-duplicates of an earlier pair's is left
    out too (``repeated``); if the two carry different labels, both are (``repeated_disputed``), as neither can be
    believed. Theme pairs are compared without regard to the order of their images, and over all themes.
    """
    kept: dict[tuple, list[LabelledPair]] = {}
    for pair in pairs:
        shown = (leader[pair.first], leader[pair.second])
        if pair.kind == "theme":
            if shown[0] == shown[1]:
                counts["near_duplicate"] += 1
                continue
            key = (pair.kind, *sorted(shown))
        else:
            key = (pair.kind, *shown, pair.question)
        kept.setdefault(key, []).append(pair)
    chosen = []
    for alike in kept.values():
        if len({pair.label for pair in alike}) > 1:
            counts["repeated_disputed"] += len(alike)
            continue
        counts["repeated"] += len(alike) - 1
        chosen.append(alike[0])
    return chosen
