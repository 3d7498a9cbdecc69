"""Objective and optimizer step of heads on given hidden states."""
