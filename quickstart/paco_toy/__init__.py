"""The shapes world: a synthetic world in which every stage of PaCo-RL visibly works on a CPU."""
