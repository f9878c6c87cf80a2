"""Choices that depend on the seed and on what is chosen, never on what else there is or on the order of the work."""

import hashlib
import random


def order_key(seed: int, *parts: object) -> bytes:
    """Sort key of a seeded shuffle: 16 bytes, the same for the same seed and parts on every machine."""
    text = "\x1f".join(str(part) for part in (seed, *parts))
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()


def generator(seed: int, *parts: object) -> random.Random:
    """A random generator of its own for these parts."""
    return random.Random(order_key(seed, *parts))
