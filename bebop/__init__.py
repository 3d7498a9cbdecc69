"""bebop: faster rollouts for LLM reinforcement learning, the same samples, and proof of both.

Importing this package pulls in neither vllm, verl, deepspeed, ray, wandb nor triton: each of those stays inside
the one adapter that needs it.
"""

__version__ = "0.1.0"
