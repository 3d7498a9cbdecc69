"""The scorer of draft heads: `score_anchors` compares them with the policy along a text, `summarise` averages the
scores.

Used by sft, eval, bench and the RL loop; see scores.py, summary.py and responses.py.
"""

from bebop.acceptance.responses import score_responses
from bebop.acceptance.scores import AnchorScores, concatenate, score_anchors, score_batches
from bebop.acceptance.summary import Acceptance, RuleAcceptance, record_key, summarise

__all__ = [
    "Acceptance",
    "AnchorScores",
    "RuleAcceptance",
    "concatenate",
    "record_key",
    "score_anchors",
    "score_batches",
    "score_responses",
    "summarise",
]
