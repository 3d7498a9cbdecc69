"""Scores of draft heads: acceptance per anchor, and its summaries."""
