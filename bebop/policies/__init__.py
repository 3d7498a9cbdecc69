"""Policies: trained here, converted from existing models, or random for tests."""

from bebop.policies.prepare import prepare_policy
from bebop.policies.random_policy import random_checkpoint

__all__ = ["prepare_policy", "random_checkpoint"]
