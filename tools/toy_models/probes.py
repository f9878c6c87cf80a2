"""Linear probes that help a transformer to find the panel that an instruction names.

Learning this from the drawing loss alone is slow, since the task's noise hides it. The probes are trained with the
transformer and discarded.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from paco_toy.world import SHAPES


class PanelProbes(nn.Module):
    """Reads image tokens after the blocks of a diffusers transformer whose blocks return (text states, image states).

    After all blocks but the first and the last: does the instruction name this token's panel? After each double block, if
    ``shapes``: which shape does the panel show?
    """

    def __init__(self, transformer: nn.Module, shapes: bool = False):
        super().__init__()
        self._states: list[torch.Tensor] = []  # image states (B, N, D) after each block of the latest forward
        double = transformer.transformer_blocks
        blocks = [*double, *getattr(transformer, "single_transformer_blocks", ())]
        self.asked = nn.ModuleList([nn.Linear(transformer.inner_dim, 1) for _ in blocks[1:-1]])
        self.shape = nn.ModuleList([nn.Linear(transformer.inner_dim, len(SHAPES)) for _ in double if shapes])
        self._hooks = [block.register_forward_hook(self._keep) for block in blocks]

    def _keep(self, block: nn.Module, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._states.append(output[1])

    def losses(self, asked: torch.Tensor, shape: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Mean cross-entropies after the latest forward.

        Args:
            asked: float (B, N) in [0, 1], of all image tokens.
            shape: int (B, N), index into SHAPES.
        """
        states, self._states = self._states, []
        # One panel in four is named.
        weight = torch.tensor(3.0)
        named = [
            binary_cross_entropy_with_logits(probe(x).squeeze(2), asked, pos_weight=weight)
            for probe, x in zip(self.asked, states[1:-1], strict=True)
        ]
        losses = {"asked": torch.stack(named).mean()}
        if shape is not None:  # strict=False: single blocks follow
            shown = [cross_entropy(p(x).flatten(0, 1), shape.flatten()) for p, x in zip(self.shape, states, strict=False)]
            losses["shape"] = torch.stack(shown).mean()
        return losses

    def remove(self) -> None:
        """Takes the hooks off the transformer."""
        for hook in self._hooks:
            hook.remove()
