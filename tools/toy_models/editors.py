"""What the training of both toy editors shares: the drawing loss, probes, and the sequence of batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from paco_toy.world import SHAPES
from toy_models.edit_data import EditBatch, asked_tokens, panel_tokens, sample_edits
from toy_models.panels import LatentCache
from toy_models.training import fit, flow_errors, pack

WEIGHTS = {"drawing": 1.0, "shape": 0.3, "asked": 0.5}  # of the losses
Legs = Sequence[tuple[float, Sequence[int], float]]


def drawing_loss(
    predict: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    latents: LatentCache,
    batch: EditBatch,
    side: int,
    config,
    asked_weight: float,
    reference_noise: float = 0.0,
) -> torch.Tensor:
    """mean w (v − (ε − x_0))², where w is larger in the panel that the instruction names; the others are mostly copied.

    Args:
        predict: (tokens (B, 2N, C), noisy ones and the reference's; times (B,)) -> velocity (B, 2N, C).
        side: Of a panel, in pixels.
        config: Configuration of the pipeline's scheduler.
        reference_noise: Noise on the reference's latents. Those of a real image differ from the cached ones: the image was
            resized, and the VAE's group norms saw other neighbors.
    """
    clean, seen = (pack(latents.grids(side, kind, batch.views, batch.variants)) for kind in (batch.after, batch.before))
    if reference_noise:
        seen = seen + reference_noise * torch.randn_like(seen)

    def velocity(noisy: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return predict(torch.cat([noisy, seen], dim=1), t)[:, : clean.shape[1]]

    errors = flow_errors(velocity, clean, config)
    weight = 1 + (asked_weight - 1) * asked_tokens(batch.place, side // 8)
    return (errors.mean(dim=2) * (weight / weight.mean())).mean()


class PanelProbes(nn.Module):
    """Linear probes on a diffusers transformer whose blocks return (text states, image states).

    They help it to find the panel that an instruction names: from the drawing loss alone this is learned late, since the
    task's noise hides it. After all blocks but the first and the last: does the instruction name this token's panel? After
    each double block, if ``shapes``: which shape does the panel show? The probes are discarded after the training.
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

    def losses(self, asked: torch.Tensor, shape: torch.Tensor) -> dict[str, torch.Tensor]:
        """Mean cross-entropies after the latest forward.

        Args:
            asked: float (B, N) in [0, 1], of all image tokens.
            shape: int (B, N), index into SHAPES.
        """
        states, self._states = self._states, []
        weight = torch.tensor(3.0)  # one panel in four is named
        asked_losses = [
            binary_cross_entropy_with_logits(probe(x).squeeze(2), asked, pos_weight=weight)
            for probe, x in zip(self.asked, states[1:-1], strict=True)
        ]
        losses = {"asked": torch.stack(asked_losses).mean()}
        if self.shape:  # strict=False: single blocks follow
            pairs = zip(self.shape, states, strict=False)
            shape_losses = [cross_entropy(probe(x).flatten(0, 1), shape.flatten()) for probe, x in pairs]
            losses["shape"] = torch.stack(shape_losses).mean()
        return losses

    def remove(self) -> None:
        """Takes the hooks off the transformer."""
        for hook in self._hooks:
            hook.remove()


def train_editor(
    name: str,
    learning: Sequence[tuple[nn.Module, float]],
    draw: Callable[[EditBatch, int, np.random.Generator], tuple[torch.Tensor, bool]],
    legs: Legs,
    batch_sizes: dict[int, int],
    seconds: float,
    seed: int,
    *,
    shapes: bool = False,
) -> None:
    """Trains an editor for a wall-clock time; its modules end with averaged weights.

    Args:
        learning: Modules with their highest learning rates; the transformer first.
        draw: (batch, panel side) -> its drawing loss, and whether the model saw the instructions.
        legs: (from which share of the time on, panel sides of successive steps, how often targets depart).
        shapes: Also probe for shapes.
    """
    torch.manual_seed(1000 * seed)
    rng = np.random.default_rng([seed, 3])
    probes = PanelProbes(learning[0][0], shapes)

    def next_loss(step: int, progress: float) -> tuple[torch.Tensor, dict]:
        _, order, departure = [leg for leg in legs if progress >= leg[0]][-1]
        side = order[step % len(order)]
        batch = sample_edits(batch_sizes[side], rng, departure)
        drawing, instructed = draw(batch, side, rng)
        asked = asked_tokens(batch.place, side // 8)
        if not instructed:
            asked = torch.full_like(asked, 0.25)  # any panel may be the one
        shape = panel_tokens(batch.before % len(SHAPES), side // 8)
        losses = {"drawing": drawing, **probes.losses(asked.repeat(1, 2), shape.repeat(1, 2))}
        loss = sum(weight * losses[n] for n, weight in WEIGHTS.items() if n in losses)
        return loss, {f"{n} {2 * side}px": value for n, value in losses.items()}

    fit([*learning, (probes, 1e-3)], next_loss, name, seconds=seconds, warm_up=100, average=True)
    probes.remove()
