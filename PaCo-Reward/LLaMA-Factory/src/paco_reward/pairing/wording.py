"""What a model is told when it ranks candidates or writes reasons, and how its answers are read. Wording of ours."""

import re
from collections.abc import Sequence

_VERDICT = re.compile(r"^[\s\"'“”*_#>\-]*(yes|no)\b[\s\"'“”*_.,:;!\-–—]*", re.IGNORECASE)
_ORDER = re.compile(r"\d+(?:\s*>\s*\d+)+")
_FEWEST_REASON_CHARACTERS = 12
_IMAGE_TAG = "<image>"  # LLaMA-Factory would look for an image


def image_messages(image_urls: Sequence[str], text: str) -> list[dict]:
    """OpenAI chat messages: the images in order, then the text."""
    images = [{"type": "image_url", "image_url": {"url": url}} for url in image_urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def ranking_request(theme: str, candidates: int) -> str:
    """Asked with the reference first and the candidates after it."""
    return (
        f"The first image is a reference. The {candidates} images after it are candidates, numbered 1 to {candidates} "
        f'in this order. All were generated based on the theme: "{theme}". Rank the candidates by how well each '
        "maintains consistency with the reference in terms of style, logic and identity, the best first. Answer with "
        'all numbers separated by ">" and nothing else, in the form: best > … > worst.'
    )


def read_order(answer: str, candidates: int) -> tuple[int, ...] | None:
    """The order in an answer such as ``2 > 1 > 3``, as indices from 0, best first; the last one if there are several.

    Returns:
        None where there is none that names each candidate once.
    """
    for found in reversed(_ORDER.findall(answer)):
        order = tuple(int(number) - 1 for number in re.findall(r"\d+", found))
        if sorted(order) == list(range(candidates)):
            return order
    return None


def reason_request(question: str, verdict: str) -> str:
    """Asked with the two images of a pair. A model that sees otherwise is told to say so: then the pair is left out."""
    return (
        f"This question was asked about the two images:\n\n{question}\n\nThe verdict that was given is: {verdict}. "
        f'Write the answer. Begin with the word "{verdict}." and then give, in two to four sentences, the detailed '
        "reasons that can be seen in the two images. Do not mention that a verdict was given. If what you see clearly "
        "contradicts the verdict, begin with the verdict that you would give instead."
    )


def read_reason(answer: str) -> tuple[str, str] | None:
    """(verdict, reasons) of a written answer: ``("Yes", "Both show …")``.

    Returns:
        None where the answer begins with neither Yes nor No, or where no reasons follow.
    """
    match = _VERDICT.match(answer)
    if match is None:
        return None
    reasons = " ".join(answer[match.end() :].split()).strip("*_ ")
    if len(reasons) < _FEWEST_REASON_CHARACTERS or _IMAGE_TAG in reasons:
        return None
    return match[1].capitalize(), reasons[0].upper() + reasons[1:]
