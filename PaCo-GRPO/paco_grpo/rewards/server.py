"""Old names of what ``asking`` and ``judge`` hold; until version 0.8."""

from paco_grpo.rewards.asking import JudgeReward, ScoreRequest, ServerReward, plain_images
from paco_grpo.rewards.judge import ConsistencyScore

__all__ = ["ConsistencyScore", "JudgeReward", "ScoreRequest", "ServerReward", "plain_images"]
