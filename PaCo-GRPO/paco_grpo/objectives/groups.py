"""What the samples of a group know of each other, over all processes (``Objective.per_group``)."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from paco_grpo.objectives.base import Group, MicroBatch, Objective
from paco_grpo.policies.base import Policy


class MeasuredSample(NamedTuple):
    """What ``Objective.measure`` returns for one sample."""

    position: int
    item_id: int
    advantage: float
    values: dict[str, np.ndarray]  # (steps,) float64


@torch.no_grad()
def measure_samples(
    objective: Objective, micro_batches: Sequence[MicroBatch], policy: Policy
) -> list[MeasuredSample]:
    """Measure this process's samples, and keep the micro-batches' velocities for the loss.

    Every process calls it with equally many micro-batches where a forward is a collective
    operation.
    """
    samples = []
    for micro_batch in micro_batches:
        columns: dict[str, list[list[float]]] = defaultdict(list)
        steps = micro_batch.build_steps()
        for step in steps:
            for name, values in objective.measure(step, policy).items():
                columns[name].append(values.tolist())
        micro_batch.frozen = [step.frozen for step in steps]
        if micro_batch.is_dummy:
            continue
        by_name = {name: np.array(rows) for name, rows in columns.items()}  # (steps, B)
        for row, item_id in enumerate(steps[0].rollout.item_ids.tolist()):
            sample = MeasuredSample(
                position=int(micro_batch.positions[row]),
                item_id=item_id,
                advantage=float(micro_batch.advantages[row]),
                values={name: values[:, row] for name, values in by_name.items()},
            )
            samples.append(sample)
    return samples


def set_group_values(
    objective: Objective, micro_batches: Sequence[MicroBatch], samples: Sequence[MeasuredSample]
) -> None:
    """Set ``MicroBatch.group``, from the measured ``samples`` of all processes."""
    if not micro_batches:  # all images of this optimizer step are on other processes
        return
    groups: dict[int, list[MeasuredSample]] = defaultdict(list)
    # Sorted, so that sums over a group do not depend on the number of processes.
    for sample in sorted(samples, key=lambda sample: sample.position):
        groups[sample.item_id].append(sample)
    num_steps = len(micro_batches[0].indices)
    rows: dict[str, dict[int, np.ndarray]] = defaultdict(dict)  # name → position → (steps,)
    for item_id, members in groups.items():
        measured = {}
        for name in members[0].values:
            measured[name] = np.stack([member.values[name] for member in members])
        advantages = np.array([member.advantage for member in members])
        for name, result in objective.per_group(Group(item_id, advantages, measured)).items():
            columns = result[:, None] if result.ndim == 1 else result
            group_rows = np.broadcast_to(columns, (len(members), num_steps))
            for member, row in zip(members, group_rows, strict=True):
                rows[name][member.position] = row
    for micro_batch in micro_batches:
        positions = micro_batch.positions.tolist()
        values = {}
        for name, row_of in rows.items():
            if micro_batch.is_dummy:
                values[name] = torch.ones(num_steps, len(positions))
            else:
                columns = np.stack([row_of[position] for position in positions], axis=1)
                values[name] = torch.tensor(columns, dtype=torch.float32)
        micro_batch.group = values
