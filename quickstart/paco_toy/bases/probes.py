"""Linear probes that help a transformer to find the panel that an instruction names.

Which shape a panel shows, and whether the instruction names it, is learned late from drawing alone: the noise of the task
drowns it. The probes learn along with the transformer and are thrown away, as those of the text encoders.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from paco_toy.world import SHAPES


class AskedProbes(nn.Module):
    """After all blocks but the first and the last: is this image token's panel the one that is asked for?

    For diffusers' transformers whose blocks return (text states, image states).
    """

    def __init__(self, transformer: nn.Module):
        super().__init__()
        self._found: list[torch.Tensor] = []
        blocks = [*transformer.transformer_blocks, *getattr(transformer, "single_transformer_blocks", ())]
        self.asked = nn.ModuleList([nn.Linear(transformer.inner_dim, 1) for _ in blocks[1:-1]])
        self._hooks = [block.register_forward_hook(self._keep) for block in blocks]

    def _keep(self, block: nn.Module, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._found.append(output[1])

    def _states(self) -> list[torch.Tensor]:
        """Image states (B, N, D) after each block of the forward just made."""
        found, self._found = self._found, []
        return found

    def loss(self, asked: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy after the forward just made; ``asked``: float (B, N) in {0, 1} of all image tokens."""
        return self._asked_loss(self._states(), asked)

    def _asked_loss(self, states: list[torch.Tensor], asked: torch.Tensor) -> torch.Tensor:
        quarter = torch.tensor(3.0)  # one panel in four is asked for
        losses = [
            nn.functional.binary_cross_entropy_with_logits(probe(x).squeeze(2), asked, pos_weight=quarter)
            for probe, x in zip(self.asked, states[1:-1], strict=True)
        ]
        return torch.stack(losses).mean()

    def remove(self) -> None:
        """Takes the hooks off the transformer."""
        for hook in self._hooks:
            hook.remove()


class PanelProbes(AskedProbes):
    """And after each double block: which shape does this token's panel show?"""

    def __init__(self, transformer: nn.Module):
        super().__init__(transformer)
        self.shape = nn.ModuleList([nn.Linear(transformer.inner_dim, len(SHAPES)) for _ in transformer.transformer_blocks])

    def losses(self, shape: torch.Tensor, asked: torch.Tensor) -> dict[str, torch.Tensor]:
        """Mean cross-entropies after the forward just made.

        Args:
            shape: int (B, N), index into SHAPES, of all image tokens' panels.
            asked: float (B, N) in {0, 1}.
        """
        states = self._states()
        # strict=False: single blocks follow
        shapes = [
            nn.functional.cross_entropy(probe(x).flatten(0, 1), shape.flatten())
            for probe, x in zip(self.shape, states, strict=False)
        ]
        return {"shape": torch.stack(shapes).mean(), "asked": self._asked_loss(states, asked)}


def panel_tokens(values: np.ndarray, side: int) -> torch.Tensor:
    """Values of panels (B, 4), row-major, for each of their tokens: (B, 4·P²) for panels of P x P tokens."""
    grid = torch.from_numpy(values).unflatten(1, (2, 2))
    return grid.repeat_interleave(side, 1).repeat_interleave(side, 2).flatten(1)


def asked_tokens(place: np.ndarray, side: int) -> torch.Tensor:
    """1 for tokens of the panels (B,) that are asked for, else 0: float (B, 4·P²) for panels of P x P tokens."""
    return panel_tokens(np.eye(4, dtype=np.float32)[place], side)
