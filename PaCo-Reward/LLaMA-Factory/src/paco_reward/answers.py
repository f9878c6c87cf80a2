"""The judge that a command names, and what it says about some images: all pairs of them, or edits of the first."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from PIL import Image

from paco_judge.client import DEFAULT_MODEL, JudgeClient, Pair
from paco_judge.grid import pairs as index_pairs
from paco_judge.questions import EDITING, RequestForm, editing_texts, form_of, load_editing_questions, load_question
from paco_judge.verdict import Verdict, editing_score, mean_score
from paco_reward.errors import PacoRewardError

TOP_LOGPROBS = 20  # as requested from servers: the same pairs have a score either way


@dataclass(frozen=True)
class Judge:
    """A judge in this process or behind a server."""

    name: str
    score: Callable[[Sequence[Pair]], list[Verdict]]
    explain: Callable[[Sequence[Pair]], list[str]]  # the whole answer to each pair


def load_judge(args: argparse.Namespace) -> Any:
    """The ``JudgeScorer`` of ``add_judge_options``. Raises ValueError or OSError."""
    from paco_judge.scorer import JudgeScorer, silence_transformers

    if not args.model:
        raise PacoRewardError("name the judge: --model FOLDER or hub NAME, with --adapter FOLDER, or --server URL")
    silence_transformers()
    return JudgeScorer.from_pretrained(args.model, args.adapter, batch_size=args.batch_size, form=form_of(args))


def client_of(args: argparse.Namespace, model: str, form: RequestForm) -> JudgeClient:
    """The client of --server and --api_key_env (other users can see command lines, hence a variable)."""
    key = os.environ.get(args.api_key_env) if args.api_key_env else None
    if args.api_key_env and not key:
        raise PacoRewardError(f"--api_key_env {args.api_key_env}: this environment variable is not set; export it")
    return JudgeClient(args.server, model, api_key=key, max_concurrency=16, form=form)


def judge_named(args: argparse.Namespace) -> Judge:
    """The judge of ``add_asking_options``. Raises as ``load_judge``."""
    if not args.server:
        judge = load_judge(args)
        name = f"{args.model} with {args.adapter}" if args.adapter else args.model
        return Judge(name, partial(judge.score, top=TOP_LOGPROBS), partial(judge.reasons, max_new_tokens=args.reason_tokens))
    if args.adapter:
        raise PacoRewardError("--adapter needs a local model; serve the adapter and name it with --model")
    client = client_of(args, args.model or DEFAULT_MODEL, form_of(args))

    def explain(pairs: Sequence[Pair]) -> list[str]:
        answers = client.write_blocking(pairs, args.reason_tokens)
        return [f"no answer: {error}" if text is None else text for text, error in answers]

    return Judge(f"{client.model} at {client.base_url}", client.score_blocking, explain)


@dataclass(frozen=True)
class Answers:
    """Images, the questions about them, and the answers of a judge."""

    judge: str
    images: Sequence[Image.Image]  # two or more, RGB
    names: Sequence[str]  # of the images
    questions: Mapping[str, str]  # one under "", on every pair; or, about edits of the first image, each by its dimension
    verdicts: Sequence[Verdict] = ()  # of ``pairs``, if they were asked for
    reasons: Sequence[str] = ()

    @property
    def about_edits(self) -> bool:
        return "" not in self.questions

    @property
    def cells(self) -> list[tuple[int, int, str]]:
        """The image numbers and the dimension of every question, in the order of ``pairs``."""
        if self.about_edits:
            return [(0, edit, dimension) for edit in range(1, len(self.images)) for dimension in self.questions]
        return [(i, j, "") for i, j in index_pairs(len(self.images))]

    @property
    def pairs(self) -> list[Pair]:
        """What the judge is asked."""
        return [Pair(self.images[i], self.images[j], self.questions[about]) for i, j, about in self.cells]

    @property
    def scores(self) -> dict[tuple[int, int, str], Verdict]:
        """The verdicts by cell; on edits with both questions, also ``overall``."""
        found = dict(zip(self.cells, self.verdicts, strict=True))
        if len(self.questions) == 2:
            for edit in range(1, len(self.images)):
                overall = editing_score(*(found[0, edit, dimension] for dimension in self.questions))
                found[0, edit, "overall"] = Verdict(overall, None if overall is not None else "an answer is missing")
        return {cell: found[cell] for cell in sorted(found, key=lambda cell: cell[:2])}

    @property
    def missing(self) -> int:
        return sum(not verdict.ok for verdict in self.verdicts)

    @property
    def mean(self) -> float | None:
        """Mean over all pairs; None if one has no score."""
        return mean_score(self.verdicts)

    def scored(self, judge: Judge) -> "Answers":
        return replace(self, verdicts=judge.score(self.pairs))

    def explained(self, judge: Judge) -> "Answers":
        return replace(self, reasons=judge.explain(self.pairs))


def questions_about(
    theme: str | None = None, instruction: str | None = None, templates: Sequence[str] | None = None
) -> dict[str, str]:
    """``Answers.questions``: on pairs with or without a theme, or, given an instruction, on edits.

    ``templates``: shipped names or text files, one, or for edits up to two; default: theme, pair, or the editing questions.
    """
    if instruction is not None:
        return editing_texts(load_editing_questions(templates or EDITING), instruction)
    about, default = (("theme",), "theme") if theme else ((), "pair")
    question, *others = templates or [default]
    if others:
        raise PacoRewardError("--question: only edits (--instruction) are asked about with two questions")
    return {"": load_question(question, about).text(theme=theme)}
