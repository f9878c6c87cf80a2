"""Our changes to LLaMA-Factory and, in ``install``, every name of it that we replace.

| replaced | by | why |
|---|---|---|
| ``parser._TRAIN_ARGS`` | arguments with ``first_token_*`` | our options |
| ``workflow.CustomSeq2SeqTrainer`` | ``_trainer_class`` | our loss and metrics, less memory |
| ``workflow.load_tokenizer`` | ``_load_tokenizer`` | the processor limits image sizes |
| ``workflow.get_template_and_fix_tokenizer`` | ``_get_template`` | the prompt is the servers' |
| ``workflow.get_dataset`` | ``_get_dataset`` | counts Yes and No |
| ``adapter.PeftModel`` | ``_Adapters`` | adapters of older names are loaded, too |
| ``SupervisedDatasetProcessor._encode_data_example`` | ``_encode_whole`` | refuses, cuts nothing |
| ``MMPluginMixin._regularize_images`` | ``_regularize_images`` | formats, EXIF, transparency |

In a training of ours, the output layer computes logits of the answers only (``loss.py``), and a
frozen vision tower computes no gradients.
"""

import copy
import importlib.metadata
import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from PIL import Image
from torch import nn
from transformers.trainer_utils import get_last_checkpoint

from paco_judge.errors import UserError
from paco_judge.images import load_image, read_image
from paco_judge.scorer import answer_ids
from paco_judge.weights import with_adapter
from paco_reward.datasets import AnswerCounts
from paco_reward.families import check_prompt, limit_images
from paco_reward.loss import answer_positions_only, find_answers, first_token_loss_func
from paco_reward.metrics import answer_statistics, judge_metrics

TESTED_VERSION = "0.9.5"
_NO_CUTOFF = 1 << 40
_LENGTH_WARNING = "sequence-length-is-longer-than-the-specified-maximum"
# Their warnings are harmless: curves without points, and a faster kernel that is not installed.
_HARMLESS_LOGGERS = ("llamafactory.extras.ploting", "bitsandbytes.backends.cpu.ops")

logger = logging.getLogger(__name__)


def install() -> None:
    """Install the overlay in this process; idempotent.

    Raises:
        UserError: Another version of LLaMA-Factory is installed.
    """
    version = importlib.metadata.version("llamafactory")
    if version != TESTED_VERSION:
        raise UserError(
            f"LLaMA-Factory {version} was not tested here; "
            f"run: pip install llamafactory=={TESTED_VERSION}"
        )
    for name in _HARMLESS_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    from llamafactory.data.mm_plugin import MMPluginMixin
    from llamafactory.data.processor import SupervisedDatasetProcessor
    from llamafactory.hparams import parser
    from llamafactory.model import adapter
    from llamafactory.train.sft import workflow

    if getattr(workflow.CustomSeq2SeqTrainer, "paco_reward", False):
        return
    names = [arguments.__name__ for arguments in parser._TRAIN_ARGS]
    index = names.index("FinetuningArguments")
    parser._TRAIN_ARGS[index] = _arguments_class(parser._TRAIN_ARGS[index])
    workflow.CustomSeq2SeqTrainer = _trainer_class(
        workflow.CustomSeq2SeqTrainer, workflow.ComputeAccuracy
    )
    workflow.load_tokenizer = partial(_load_tokenizer, workflow.load_tokenizer)
    workflow.get_template_and_fix_tokenizer = partial(
        _get_template, workflow.get_template_and_fix_tokenizer
    )
    workflow.get_dataset = partial(_get_dataset, workflow.get_dataset)
    adapter.PeftModel = _Adapters
    _replace_method(SupervisedDatasetProcessor, "_encode_data_example", _encode_whole)
    _replace_method(MMPluginMixin, "_regularize_images", _regularize_images)


def _replace_method(owner: type, name: str, replacement: Callable) -> None:
    """Let ``replacement(original, self, …)`` answer calls of a method."""
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(original, self, *args, **kwargs)

    setattr(owner, name, method)


def _load_tokenizer(original: Callable, model_args: Any) -> dict[str, Any]:
    loaded = original(model_args)
    # No warning of texts above model_max_length: cutoff_len is what counts here.
    loaded["tokenizer"].deprecation_warnings[_LENGTH_WARNING] = True
    if hasattr(loaded["processor"], "image_processor"):
        limit_images(loaded["processor"], model_args.image_max_pixels)
    return loaded


def _get_template(original: Callable, tokenizer: Any, data_args: Any) -> Any:
    chat_template = tokenizer.chat_template  # LLaMA-Factory gives its own to one without
    template = original(tokenizer, data_args)
    check_prompt(template, tokenizer, chat_template)
    return template


def _get_dataset(
    original: Callable,
    template: Any,
    model_args: Any,
    data_args: Any,
    training_args: Any,
    tokenizer: Any,
    **kwargs: Any,
) -> dict[str, Any]:
    """LLaMA-Factory's data sets, after saying how many answers are Yes and how many are No.

    Raises:
        UserError: The training has answers of one kind only.
    """
    module = original(template, model_args, data_args, training_args, tokenizer=tokenizer, **kwargs)
    if data_args.streaming:  # counting would read all of it
        return module
    if training_args.do_train:
        train = count_answers(module["train_dataset"], tokenizer)
        logger.info("training pairs: %s", train)
        if train.are_all_one:
            raise UserError(
                f"training pairs: {train}. A judge would learn to give one answer to "
                "everything. Add pairs with the other answer; max_samples takes the first rows of "
                "each data set"
            )
    tests = module.get("eval_dataset")
    if tests is None or training_args.predict_with_generate:
        return module
    for name, dataset in (tests if isinstance(tests, dict) else {"": tests}).items():
        test = count_answers(dataset, tokenizer)
        kind = f" of {name}" if name else ""
        logger.info("evaluation pairs%s: %s", kind, test.for_measures())
    return module


def count_answers(dataset: Any, tokenizer: Any) -> AnswerCounts:
    """Count what the rows of a tokenized data set are trained to answer; a row may have several."""
    (yes_id,), (no_id,) = answer_ids(tokenizer)
    counts: Counter[int] = Counter()
    for row in dataset.select_columns("labels"):
        answers = find_answers(torch.tensor([row["labels"]]))
        counts.update(answers.tokens[answers.is_first].tolist())
    yes = counts[yes_id]
    no = counts[no_id]
    return AnswerCounts(yes, no, counts.total() - yes - no)


class _Adapters:
    """With which LLaMA-Factory loads an adapter that a training continues or merges.

    Where layers find no tensors in it, PEFT alone would only warn, and train from the base.
    """

    from_pretrained = staticmethod(with_adapter)


def _regularize_images(original: Callable, plugin: Any, images: list, **kwargs: Any) -> Any:
    """LLaMA-Factory's, on the pictures that every other program of ours sees."""
    return original(plugin, [_picture(image) for image in images], **kwargs)


def _picture(image: Any) -> Image.Image:
    """An image of a data set: its file, its content, both as ``datasets`` stores them, or itself.

    Raises:
        UserError: It cannot be decoded, or has a format that the judge's servers refuse.
    """
    if isinstance(image, dict):
        image = image["bytes"] or image["path"]
    try:
        return read_image(image) if isinstance(image, bytes) else load_image(image)
    except ValueError as error:
        raise UserError(str(error)) from error


def _encode_whole(original: Callable, processor: Any, **example: Any) -> tuple[list, list]:
    """An example's input ids and labels in full length: LLaMA-Factory would cut the question first.

    Raises:
        UserError: It is longer than ``cutoff_len``.
    """
    cutoff = processor.data_args.cutoff_len
    whole = copy.copy(processor)
    whole.data_args = copy.copy(processor.data_args)
    whole.data_args.cutoff_len = _NO_CUTOFF
    input_ids, labels = original(whole, **example)
    if len(input_ids) > cutoff:
        raise UserError(
            f"an example has {len(input_ids)} tokens, more than cutoff_len: {cutoff}. A judge must "
            "see the whole question and answer: raise cutoff_len, lower image_max_pixels, or "
            "remove what is too long"
        )
    return input_ids, labels


def _arguments_class(base: type) -> type:
    @dataclass
    class FirstTokenArguments(base):
        # Weight of the answer's first token, in [0, 1]; null: LLaMA-Factory's own loss.
        first_token_weight: float | None = None
        # Normalized per answer, or as in the authors' trainer.
        first_token_scheme: Literal["sequence", "released"] = "sequence"
        # Turns compute_accuracy on, which measures it too.
        first_token_accuracy: bool = False

        def __post_init__(self) -> None:
            super().__post_init__()
            self.compute_accuracy = self.compute_accuracy or self.first_token_accuracy

    FirstTokenArguments.__name__ = FirstTokenArguments.__qualname__ = base.__name__
    return FirstTokenArguments


def compute_frozen_towers_without_gradients(model: nn.Module) -> None:
    """Keep no activations of a frozen vision tower: 14 GiB for two images of a megapixel at 7B.

    Gradient checkpointing makes transformers 5 give every tower inputs that require gradients, and
    autograd would then store what a frozen tower never uses.
    """
    for name, module in model.named_modules():
        is_tower = name.rpartition(".")[2] == "visual"
        if is_tower and not any(parameter.requires_grad for parameter in module.parameters()):
            module.forward = torch.no_grad()(module.forward)
            logger.info("the vision tower is frozen: it is computed without gradients")


def leave_casts_to_autocast(model: nn.Module) -> None:
    """Give LoRA layers their bfloat16 inputs as they are: 3.9 GiB less for 8 pairs at 7B.

    peft would cast inputs to the adapter's float32, and autocast cast them back.
    """
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.cast_input_dtype_enabled = False


def _trainer_class(base: type, upstream_metric: type) -> type:
    """LLaMA-Factory's SFT trainer with our metrics, and our loss where its ``dft`` loss goes."""

    class FirstTokenTrainer(base):
        paco_reward = True

        def __init__(self, finetuning_args: Any, processor: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(kwargs.get("compute_metrics"), upstream_metric):
                (yes_id,), (no_id,) = answer_ids(kwargs["tokenizer"])
                kwargs["compute_metrics"] = judge_metrics

                def statistics(logits: Any, labels: torch.Tensor) -> torch.Tensor:
                    answers = answer_statistics(logits, labels, yes_id, no_id)
                    # Packed rows of one process may have more answers than those of another.
                    return self.accelerator.pad_across_processes(answers, dim=1, pad_index=-100)

                kwargs["preprocess_logits_for_metrics"] = statistics
            super().__init__(finetuning_args, processor, *args, **kwargs)
            compute_frozen_towers_without_gradients(self.model)
            # Generation computes outside of autocast. Only LLaMA-Factory's arguments have this one.
            generates = getattr(self.args, "predict_with_generate", False)
            if self.accelerator.native_amp and not generates:
                leave_casts_to_autocast(self.model)
            if finetuning_args.first_token_weight is not None:
                self.compute_loss_func = partial(
                    first_token_loss_func,
                    weight=finetuning_args.first_token_weight,
                    scheme=finetuning_args.first_token_scheme,
                )

        def compute_loss(
            self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
        ) -> Any:
            """The loss of a micro-batch; of the logits, only the answers' are computed."""
            if self.finetuning_args.first_token_weight is None or "labels" not in inputs:
                return super().compute_loss(model, inputs, *args, **kwargs)
            mask = find_answers(inputs["labels"]).mask
            with answer_positions_only(self.model.get_output_embeddings(), mask):
                return super().compute_loss(model, inputs, *args, **kwargs)

        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            """LLaMA-Factory's own, but every pair counts once."""
            # Seq2SeqTrainer.evaluate chooses accelerator.gather, which also counts the pairs that
            # fill the last batches where the data do not divide among the processes.
            self.gather_function = self.accelerator.gather_for_metrics
            return super().evaluation_loop(*args, **kwargs)

        def _get_num_items_in_batch(
            self, batch_samples: list, device: torch.device
        ) -> torch.Tensor | None:
            """The divisor of the loss: the answers of an optimizer step on all processes.

            For ``released`` it is the micro-batches. Every process divides by it. The trainer then
            multiplies by the number of processes, because their gradients are averaged.
            """
            if self.finetuning_args.first_token_weight is None:
                return super()._get_num_items_in_batch(batch_samples, device)
            if self.finetuning_args.first_token_scheme == "released":
                count = len(batch_samples)
            else:
                count = sum(len(find_answers(batch["labels"]).lengths) for batch in batch_samples)
            return self.accelerator.gather(torch.tensor(count, device=device)).sum()

        def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
            """LLaMA-Factory's own, before each optimizer step, which needs it to be finite."""
            grad_norm = super()._get_grad_norm(*args, **kwargs)
            # fp16 skips such steps itself.
            if grad_norm is None or self.args.fp16 or math.isfinite(grad_norm):
                return grad_norm
            saved = get_last_checkpoint(self.args.output_dir)
            checkpoint = f"the last good checkpoint is {saved}" if saved else "nothing is saved yet"
            raise UserError(
                f"training stopped at step {self.state.global_step}: the gradient norm is not "
                f"finite; {checkpoint}. Lower learning_rate, or look for damaged pairs, and repeat "
                "the command"
            )

    return FirstTokenTrainer
