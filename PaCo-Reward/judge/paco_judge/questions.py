"""What is asked about images (templates: ``questions.toml``, or text files) and in which form."""

import argparse
import hashlib
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image

from paco_judge.verdict import ANSWER_TOKENS

# With thinking off, Qwen3.5's answers begin with Yes or No. Other chat templates ignore it.
CHAT_OPTIONS = {"enable_thinking": False}
EDITING = ("editing_consistency", "editing_instruction")
BETTER = ("better", "better_edit")
EDIT_DIMENSIONS = ("prompt_following", "consistency", "overall")  # as EditReward-Bench names them
# What a shipped question about an edit is about.
_ABOUT = {"editing_consistency": "consistency", "editing_instruction": "prompt_following"}
IMAGE_FORMATS = ("png", "jpeg")
_FIELD = re.compile(r"\{ *([A-Za-z_]+) *\}")  # also {Theme}, which is none: it would be asked
_KNOWN = [
    "theme",
    "criterion",
    "criterion_sentence",
    "instruction",
    "prompt",
    "rows",
    "rows_s",
    "cols",
    "cols_s",
]
_KNOWN += ["question", "verdict"]  # of a request for reasons


@cache
def shipped() -> dict[str, str]:
    """Our templates by name."""
    return tomllib.loads(Path(__file__).with_name("questions.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Question:
    """A template. ``name``: its shipped name, or its file's name, without suffix if none is shipped
    under it.
    """

    name: str
    template: str

    @property
    def fields(self) -> set[str]:
        """A subset of theme, criterion, instruction, prompt, rows, cols."""
        return {field.partition("_")[0] for field in _FIELD.findall(self.template)}

    def text(self, **values: str | int) -> str:
        """The template with ``values`` in place of its fields."""
        if "criterion" in values:
            criterion = str(values["criterion"]).strip()
            ends = criterion.endswith((".", "!", "?", '"'))
            values["criterion"] = criterion
            values["criterion_sentence"] = criterion if ends else f"{criterion}."
        for name in ("rows", "cols"):
            if name in values:
                values[f"{name}_s"] = "s" if values[name] > 1 else ""
        return _FIELD.sub(lambda field: str(values[field[1]]), self.template)

    def texts(
        self, criteria: Mapping[str, Mapping[str, str]], **values: str
    ) -> dict[str | None, tuple[str, ...]]:
        """The texts to ask, by dimension: one for each criterion if the template has {criterion}.

        Without that field there is one text, of no dimension (None).

        Args:
            criteria: ``{dimension: {name: text}}``.
            **values: Of the template's other fields.

        Raises:
            ValueError: The template asks about criteria, and none has text.
        """
        if "criterion" not in self.fields:
            return {None: (self.text(**values),)}
        texts: dict[str | None, tuple[str, ...]] = {}
        for dimension, named in criteria.items():
            stated = [text for text in (named or {}).values() if text and text.strip()]
            if stated:
                texts[dimension] = tuple(self.text(criterion=text, **values) for text in stated)
        if not texts:
            raise ValueError(
                "the item has no criteria to ask about; use the theme question instead"
            )
        return texts


def load_question(question: str, about: Collection[str] = _KNOWN) -> Question:
    """A question of ours by its name, or the one in a text file.

    ``about``: fields that the caller fills in. Raises ValueError.
    """
    name = question
    template = shipped().get(question)
    try:
        if template is None:
            file = Path(question).expanduser()
            name = file.name if file.stem in shipped() else file.stem
            template = file.read_text(encoding="utf-8-sig").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(shipped())
        raise ValueError(
            f"question {question!r} is neither one of ours ({names}) nor a text file: {error}"
        ) from error
    if not template.strip():
        raise ValueError(f"question file {question} is empty")
    for field in _FIELD.findall(template):
        if field not in _KNOWN or field.partition("_")[0] not in about:
            possible = ", ".join(f"{{{known}}}" for known in about) or "none"
            raise ValueError(
                f"question {question!r} has the field {{{field}}}; possible fields here: {possible}"
            )
    return Question(name, template)


def load_editing_questions(question: str | Sequence[str] = EDITING) -> tuple[Question, ...]:
    """One question about an edit, or two: is the rest kept, is the instruction followed.

    Raises ValueError.
    """
    names = (question,) if isinstance(question, str) else tuple(question)
    if len(names) not in (1, 2):
        raise ValueError(f"one question about an edit or two, not {len(names)}: {', '.join(names)}")
    for name, expected in zip(names, EDITING, strict=False):
        if len(names) == 2 and name in EDITING and name != expected:
            raise ValueError(
                f"{name} is in the place of {expected}: the first of two questions about an edit "
                "asks whether the rest is kept, the second whether the instruction is followed"
            )
    return tuple(load_question(name, ("instruction",)) for name in names)


def editing_texts(
    questions: Sequence[Question], instruction: str, dimension: str = "overall"
) -> dict[str, str]:
    """The texts that decide one of ``EDIT_DIMENSIONS``, by what each is about.

    ``overall`` needs both. A single question decides every dimension, and has its own name.
    Raises ValueError: The instruction is empty; KeyError: There is no such dimension.
    """
    if not instruction.strip():
        raise ValueError("the editing instruction is empty")
    texts = [question.text(instruction=instruction.strip()) for question in questions]
    if len(questions) == 1:
        name = questions[0].name
        return {_ABOUT.get(name, name): texts[0]}
    consistency, following = texts
    both = {"prompt_following": following, "consistency": consistency}
    return both if dimension == "overall" else {dimension: both[dimension]}


def theme_question(theme: str) -> str:
    """The published question on two panels of one grid."""
    return load_question("theme").text(theme=theme)


@dataclass(frozen=True)
class RequestForm:
    """How images and answers travel. The fields are described at ``add_form_arguments``."""

    image_labels: str | None = None
    image_format: str = "png"
    answer_tokens: str = "exact"

    def __post_init__(self) -> None:
        _check_choice("image_format", self.image_format, IMAGE_FORMATS)
        _check_choice("answer_tokens", self.answer_tokens, ANSWER_TOKENS)
        labels = self.image_labels or ""
        if "{n}" not in labels and re.search(r"\d", labels):
            raise ValueError(
                f"image_labels={labels!r}: write {{n}} for the number, as in '<img{{n}}>: '"
            )

    def label(self, number: int) -> str:
        """The text before image ``number``, counted from 1."""
        return (self.image_labels or "").replace("{n}", str(number))


def _check_choice(name: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; known: {', '.join(choices)}")


DEFAULT_FORM = RequestForm()


def add_form_arguments(
    parser: argparse._ActionsContainer, answer_tokens: str = DEFAULT_FORM.answer_tokens
) -> None:
    """Add the options of ``form_of`` to a command; ``answer_tokens`` is the default of its own."""
    text = 'text before each image, {n} = its number: "<img{n}>: "; default: none'
    parser.add_argument("--image_labels", metavar="TEXT", help=text)
    parser.add_argument(
        "--image_format",
        choices=IMAGE_FORMATS,
        default=DEFAULT_FORM.image_format,
        help="how the judge gets images (default %(default)s)",
    )
    text = "exact: Yes and No; variants: also y and n, upper and lower case, after a space"
    parser.add_argument(
        "--answer_tokens",
        choices=tuple(ANSWER_TOKENS),
        default=answer_tokens,
        help=f"{text} (default %(default)s)",
    )


def form_of(options: argparse.Namespace) -> RequestForm:
    """The form that a command line states. Raises ValueError."""
    return RequestForm(options.image_labels, options.image_format, options.answer_tokens)


def record(questions: Sequence[Question], form: RequestForm) -> dict[str, Any]:
    """What was asked, for the files of a run."""
    rows = []
    for question in questions:
        digest = hashlib.sha256(question.template.encode()).hexdigest()
        rows.append(asdict(question) | {"sha256": digest})
    return {"questions": rows, **asdict(form)}


@dataclass(frozen=True)
class Pair:
    """Images and a question about them; ``image_b`` None: one image alone."""

    image_a: Image.Image
    image_b: Image.Image | None
    question: str
    more_images: tuple[Image.Image, ...] = ()

    @property
    def images(self) -> tuple[Image.Image, ...]:
        """All images, in the order in which they are shown."""
        first = (self.image_a,) if self.image_b is None else (self.image_a, self.image_b)
        return (*first, *self.more_images)


def build_messages(
    image_urls: Sequence[str], question: str, form: RequestForm = DEFAULT_FORM
) -> list[dict]:
    """OpenAI chat messages: the images in order, then the question."""
    content: list[dict[str, Any]] = []
    for number, url in enumerate(image_urls, start=1):
        if form.image_labels:
            content.append({"type": "text", "text": form.label(number)})
        content.append({"type": "image_url", "image_url": {"url": url}})
    return [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]
