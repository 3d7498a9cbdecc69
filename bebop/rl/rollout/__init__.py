"""The rollout servers of a GRPO run, the agent loop that asks them, and the reward."""
