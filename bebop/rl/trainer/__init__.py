"""The trainer of a GRPO run, the worker that holds the policy, and the process around them."""
