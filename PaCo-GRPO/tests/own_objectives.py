"""Objectives as users write them, named by ``own_objectives:NAME`` in runs."""

import numpy as np

from paco_grpo.objectives.ppo import Ppo


class Extremes(Ppo):
    """The best and the worst image of each group are trained."""

    def keep(self, advantages, item_ids):
        mask = np.zeros(len(advantages), bool)
        for item_id in set(item_ids.tolist()):
            members = np.flatnonzero(item_ids == item_id)
            order = advantages[members].argsort()
            mask[members[order[[0, -1]]]] = True
        return mask


class Nothing(Ppo):
    def keep(self, advantages, item_ids):
        return advantages > 1e9


class Numbers(Ppo):
    """Returns numbers of images instead of a mask."""

    def keep(self, advantages, item_ids):
        return np.flatnonzero(advantages > 0)


class Late(Ppo):
    """Noise that leaves the schedule in the second epoch."""

    def noise_steps(self, epoch):
        return [1, 2 + epoch]
