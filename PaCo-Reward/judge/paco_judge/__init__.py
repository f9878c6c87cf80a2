"""The protocol of the PaCo-Reward judge, shared by PaCo-Reward and PaCo-GRPO."""
