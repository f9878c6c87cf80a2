"""What is said about panels: captions and the judge's reasons. Kept apart from the judge's question, which is paco_judge's."""

from __future__ import annotations

from paco_toy.world import Character

CAPTION_ONE = "What does the image show?"
CAPTION_TWO = "What do the two images show?"


def caption_one(character: Character) -> str:
    """Answer to CAPTION_ONE."""
    return f"A {character}."


def caption_two(first: Character, second: Character) -> str:
    """Answer to CAPTION_TWO."""
    return f"First a {first}, second a {second}."


COMPARISON = "What do the two images have in common?"


def shared_attributes(first: Character, second: Character) -> str:
    """Answer to COMPARISON."""
    shared = [name for name in ("style", "colour", "shape") if getattr(first, name) == getattr(second, name)]
    if len(shared) == 3:
        return "Everything."
    return f"Only {' and '.join(shared)}." if shared else "Nothing."


def presence_question(thing: str) -> str:
    """A yes/no question on one image, of a colour, a shape or a style."""
    return f"Does the image show something {thing}? Answer Yes or No."


def verdict(first: Character, second: Character) -> str:
    """The judge's answer on a pair: Yes or No first, then the reason."""
    if first == second:
        return f"Yes. Both show a {first}."
    return f"No. First a {first}, second a {second}."
