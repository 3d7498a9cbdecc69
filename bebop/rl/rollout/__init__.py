"""The rollout servers of a GRPO run, the agent loop that sends them requests, and the reward."""
