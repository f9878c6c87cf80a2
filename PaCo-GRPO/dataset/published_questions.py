"""The published judge's own questions, from a clone of its repository (``fetch.py questions``).

None of their words are here: only where they are written, and what their variables are called.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paco_judge.errors import UserError
from paco_judge.files import write_atomically
from paco_judge.questions import Question

REPOSITORY = "https://github.com/X-GenGroup/PaCo-RL"
_FIELDS = {  # variable in their texts -> field of our templates
    "prompt": "instruction",
    "text_prompt": "instruction",
    "criteria_text": "criterion",
    "main_prompt": "theme",
}
_EDIT_VARIABLES = ("consistency_text_prompt", "prompt_following_text_prompt")


@dataclass(frozen=True)
class Place:
    """Where questions are written: they are assigned to variables in a function or class.

    ``names``: our names of the questions by variable and, where it is assigned in
    ``if self.… == VERSION``, by version.
    """

    file: str
    function: str
    names: Mapping[tuple[str, int | None], str]


def _edits(name: str) -> dict[tuple[str, int | None], str]:
    kept, followed = _EDIT_VARIABLES
    return {(kept, None): f"{name}_consistency", (followed, None): f"{name}_instruction"}


def _versions(name: str, *versions: int) -> dict[tuple[str, int | None], str]:
    return {("text_prompt", version): f"{name}_{version}" for version in versions}


# Names of their own: the rewards know the shipped ones.
PLACES = (
    Place(
        "PaCo-GRPO/paco_grpo/rewards/consistency_for_editing.py",
        "ConsistencyScorerForEditing",
        _edits("published_editing"),
    ),
    Place(
        "PaCo-GRPO/paco_grpo/rewards/consistency_scorer.py",
        "_async_compute_image_consistency",
        _versions("published_grid", 0, 1, 2),
    ),
    Place(
        "PaCo-Reward/evaluation/Edit-Bench/editscore/__init__.py",
        "ConsistencyScore",
        _edits("published_edit_bench"),
    ),
    Place(
        "PaCo-Reward/evaluation/Consistency_Rank/consistency_scorer_vllm.py",
        "compute_image_consistency",
        _versions("published_rank", 1, 2, 3),
    ),
)
USE = """\
The published judge, PaCo-Reward-7B, is asked with these questions. Training of editors:
  --config.train.reward_fn_kwargs.consistency_for_editing.question='\
["{0}/published_editing_consistency.txt", "{0}/published_editing_instruction.txt"]'
Training on grids, with the published prompt_template_version 0, 1 (our theme) or 2:
  --config.train.reward_fn_kwargs.consistency_score.question="{0}/published_grid_0.txt"
EditReward-Bench, in PaCo-Reward/evaluation/Edit-Bench:
  bash evaluate_vllm_PaCoReward.sh --image_labels "<img{{n}}>: " --answer_tokens variants \
--resize_edits --question "{0}/published_edit_bench_consistency.txt" \
"{0}/published_edit_bench_instruction.txt"
ConsistencyRank, in PaCo-Reward/evaluation/Consistency_Rank, template 1, 2 or 3:
  python eval_vllm.py --image_labels "<img{{n}}>: " --question "{0}/published_rank_3.txt"\
"""


def write_questions(source: Path, folder: Path) -> list[str]:
    """Write each question of a clone to FOLDER/NAME.txt; returns the names.

    Raises UserError: A file is missing, or it is written otherwise than we know.
    """
    names = []
    for place in PLACES:
        for name, text in _read(source, place).items():
            write_atomically(folder / f"{name}.txt", f"{text}\n")
            names.append(name)
    return names


def _read(source: Path, place: Place) -> dict[str, str]:
    """The texts of a file's questions by their names."""
    file = source / place.file
    try:
        module = ast.parse(file.read_bytes())
    except OSError as error:
        raise UserError(
            f"{source} has no {place.file}: --source must be a clone of the published repository "
            f"(git clone {REPOSITORY})"
        ) from error
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{file} is no Python file: {error}") from error
    texts: dict[str, str] = {}
    for scope in ast.walk(module):
        if getattr(scope, "name", None) != place.function:
            continue
        for variable, version, value in _assignments(scope):
            name = place.names.get((variable, version))
            if name is None:
                continue
            text = _text(value, file)
            if texts.setdefault(name, text) != text:
                raise _other(file, f"{variable} has two texts, the second in line {value.lineno}")
    for (variable, version), name in place.names.items():
        if name not in texts:
            which = "" if version is None else f" of version {version}"
            raise _other(file, f"{place.function} assigns no {variable}{which}")
    return texts


def _other(file: Path, what: str) -> UserError:
    return UserError(
        f"{file} is another version than the one that is known here: {what}. Write the questions "
        "into text files by hand (docs/real-weights.md, the judge's wordings)"
    )


def _assignments(
    node: ast.AST, version: int | None = None
) -> Iterator[tuple[str, int | None, ast.expr]]:
    """(variable, version, value) of every assignment in a statement."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        yield node.targets[0].id, version, node.value
    if isinstance(node, ast.If):
        inner = version
        if isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], ast.Eq):
            compared = node.test.comparators[0]
            inner = compared.value if isinstance(compared, ast.Constant) else version
        for statement in node.body:
            yield from _assignments(statement, inner)
        for statement in node.orelse:
            yield from _assignments(statement, version)
        return
    for child in ast.iter_child_nodes(node):
        yield from _assignments(child, version)


def _text(value: ast.expr, file: Path) -> str:
    """The template of a string or f-string."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return _text(value.left, file) + _text(value.right, file)
    parts = []
    for part in value.values if isinstance(value, ast.JoinedStr) else [value]:
        match part:
            # Not with braces that our templates would fill in.
            case ast.Constant(value=str(text)) if not Question("", text).fields:
                parts.append(text)
            case ast.FormattedValue(ast.Name(name), conversion=-1, format_spec=None) if (
                name in _FIELDS
            ):
                parts.append(f"{{{_FIELDS[name]}}}")
            case _:
                what = f"{ast.unparse(part)} in line {value.lineno} cannot be part of a question"
                raise _other(file, what)
    return "".join(parts)
