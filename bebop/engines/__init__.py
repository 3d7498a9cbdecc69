"""Rollout engines behind one protocol, and the corrections that the installed vLLM needs."""
