"""bebop: faster rollouts for LLM reinforcement learning, from the same distribution, with proof of both.

Importing this package pulls in neither vllm, verl, deepspeed, ray, wandb nor triton: each of those stays inside
the one adapter that needs it.
"""

__version__ = "0.1.0"
