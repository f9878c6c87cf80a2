"""Memory that training a judge does not need."""

import logging

import torch
from torch import nn

logger = logging.getLogger(__name__)


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
