"""Our changes to LLaMA-Factory, at three seams. No other file of this package touches upstream internals.

1. The finetuning arguments gain ``first_token_weight``, ``first_token_scheme`` and ``first_token_accuracy``.
2. The SFT trainer gets the first-token-weighted loss (``null``: LLaMA-Factory's own), whose logits are those of the
   answers alone, and the judge's metrics. It keeps no activations of a frozen vision tower.
3. The tokenizer's template is compared with the model's chat template, the processor limits the images, and a damaged
   image is named.
"""

import importlib.metadata
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from paco_judge.scorer import option_ids
from paco_reward.errors import PacoRewardError
from paco_reward.families import check_prompt, limit_images
from paco_reward.loss import answer_positions_only, find_answers, first_token_loss
from paco_reward.metrics import judge_metrics

TESTED_VERSION = "0.9.5"


def install() -> None:
    """Install the overlay in this process; idempotent. Raises PacoRewardError: another LLaMA-Factory is installed."""
    version = importlib.metadata.version("llamafactory")
    if version != TESTED_VERSION:
        raise PacoRewardError(
            f"LLaMA-Factory {version} was not tested here; run: pip install llamafactory=={TESTED_VERSION}"
        )
    from llamafactory.data.mm_plugin import MMPluginMixin
    from llamafactory.hparams import parser
    from llamafactory.train.sft import workflow

    if getattr(workflow.CustomSeq2SeqTrainer, "paco_reward", False):
        return
    base = next(cls for cls in parser._TRAIN_ARGS if cls.__name__ == "FinetuningArguments")
    parser._TRAIN_ARGS[parser._TRAIN_ARGS.index(base)] = _arguments_class(base)
    _change_inputs(workflow, MMPluginMixin)
    workflow.CustomSeq2SeqTrainer = _trainer_class(
        workflow.CustomSeq2SeqTrainer, workflow.ComputeAccuracy
    )


def _change_inputs(workflow: Any, plugin: Any) -> None:
    load_tokenizer, get_template = workflow.load_tokenizer, workflow.get_template_and_fix_tokenizer
    preprocess_image = plugin._preprocess_image

    def limited(model_args: Any) -> dict[str, Any]:
        loaded = load_tokenizer(model_args)
        if hasattr(loaded["processor"], "image_processor"):
            limit_images(loaded["processor"], model_args.image_max_pixels)
        return loaded

    def checked(tokenizer: Any, data_args: Any) -> Any:
        chat_template = (
            tokenizer.chat_template
        )  # LLaMA-Factory gives its own to a tokenizer without one
        template = get_template(tokenizer, data_args)
        check_prompt(template, tokenizer, chat_template)
        return template

    def named(self: Any, image: Any, **kwargs: Any) -> Any:
        try:
            image.load()
        except (OSError, SyntaxError, ValueError) as error:
            raise OSError(
                f"image {getattr(image, 'filename', '')} cannot be read: {error}"
            ) from error
        return preprocess_image(self, image, **kwargs)

    workflow.load_tokenizer, workflow.get_template_and_fix_tokenizer = limited, checked
    plugin._preprocess_image = named


def _arguments_class(base: type) -> type:
    @dataclass
    class FirstTokenArguments(base):
        first_token_weight: float | None = (
            None  # of the answer's first token, in [0, 1]; null: LLaMA-Factory's loss
        )
        first_token_scheme: Literal["sequence", "released"] = (
            "sequence"  # per sequence, or as the authors' trainer
        )
        first_token_accuracy: bool = False  # turns compute_accuracy on, which measures it too

        def __post_init__(self) -> None:
            super().__post_init__()
            self.compute_accuracy = self.compute_accuracy or self.first_token_accuracy

    FirstTokenArguments.__name__ = FirstTokenArguments.__qualname__ = base.__name__
    return FirstTokenArguments


def answer_statistics(logits: Any, labels: torch.Tensor, yes_id: int, no_id: int) -> torch.Tensor:
    """Of one evaluation batch, (B, 4) float32: share of answer tokens right, first token right (0/1), P(Yes) at the first
    token, and the label there (1 Yes, 0 No, NaN other).

    Rows without an answer are NaN; of several answers in a row (packed batches) the last three columns describe the
    first. ``logits``: (K, V) of the positions that predict a labeled token, or (B, L, V), or a tuple that begins so.
    """
    logits = logits[0] if isinstance(logits, (list, tuple)) else logits
    mask = find_answers(labels).mask
    counts, target = mask.sum(1), labels[:, 1:][mask]
    if logits.dim() == 3:
        logits = logits[:, :-1][mask]
    has_answer, row = counts > 0, mask.nonzero()[:, 0]
    begin = (counts.cumsum(0) - counts)[
        has_answer
    ]  # the first token of each row's answers among the K
    right = (logits.argmax(-1) == target).float()
    first, wanted = logits[begin].float(), target[begin]
    statistics = torch.full((len(labels), 4), torch.nan, device=logits.device)
    statistics[has_answer] = torch.stack(
        [
            (torch.zeros_like(counts, dtype=torch.float32).index_add(0, row, right) / counts)[
                has_answer
            ],
            right[begin],
            torch.sigmoid(first[:, yes_id] - first[:, no_id]),
            torch.where(wanted == yes_id, 1.0, torch.where(wanted == no_id, 0.0, torch.nan)),
        ],
        dim=1,
    )
    return statistics


def _trainer_class(base: type, upstream_metric: type) -> type:
    """LLaMA-Factory's SFT trainer with our metric, and our loss in the hook of its own dft loss."""

    class FirstTokenTrainer(base):
        paco_reward = True

        def __init__(self, finetuning_args: Any, processor: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(kwargs.get("compute_metrics"), upstream_metric):
                yes_id, no_id = option_ids(kwargs["tokenizer"])
                kwargs["compute_metrics"] = judge_metrics
                kwargs["preprocess_logits_for_metrics"] = partial(
                    answer_statistics, yes_id=yes_id, no_id=no_id
                )
            super().__init__(finetuning_args, processor, *args, **kwargs)
            _compute_frozen_towers_without_gradients(self.model)
            if finetuning_args.first_token_weight is None:
                return
            weight, scheme = finetuning_args.first_token_weight, finetuning_args.first_token_scheme

            def loss(
                outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None
            ) -> torch.Tensor:
                return first_token_loss(
                    outputs["logits"], labels, weight, scheme, num_items_in_batch
                )

            self.compute_loss_func = loss

        def compute_loss(
            self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
        ) -> Any:
            if self.finetuning_args.first_token_weight is None or "labels" not in inputs:
                return super().compute_loss(model, inputs, *args, **kwargs)
            mask = find_answers(inputs["labels"]).mask
            with answer_positions_only(self.model.get_output_embeddings(), mask):
                return super().compute_loss(model, inputs, *args, **kwargs)

        def _get_num_items_in_batch(
            self, batch_samples: list, device: torch.device
        ) -> torch.Tensor | None:
            """The divisor of an optimizer step's loss, over its micro-batches and all processes.

            The trainer multiplies the loss by the number of processes, whose gradients are averaged.
            """
            if self.finetuning_args.first_token_weight is None:
                return super()._get_num_items_in_batch(batch_samples, device)
            if self.finetuning_args.first_token_scheme == "released":
                count = len(batch_samples)
            else:
                count = sum(len(find_answers(batch["labels"]).lengths) for batch in batch_samples)
            # At least 1: a batch whose answers were all truncated has loss 0, not NaN.
            return self.accelerator.gather(torch.tensor(count, device=device)).sum().clamp(min=1)

    return FirstTokenTrainer


def _compute_frozen_towers_without_gradients(model: Any) -> None:
    """Keep no activations of a frozen vision tower, 14 GiB for two images of a megapixel at 7B.

    For gradient checkpointing, transformers 5 makes the inputs of every tower require gradients.
    """
    for name, module in model.named_modules():
        if name.endswith("visual") and not any(
            parameter.requires_grad for parameter in module.parameters()
        ):
            module.forward = torch.no_grad()(module.forward)
