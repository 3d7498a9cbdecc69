"""The trainer's process of a GRPO run, and the worker that holds the policy."""
