"""Expected acceptance of a scored text, by every rule and depth, with standard errors.

    P(first j accepted) = mean over anchors of RULES[rule].expected(scores)
    acceptance length   = 1 + sum over j of P(first j accepted), in tokens per target forward, for drafts of K tokens

Standard errors are over documents, because anchors of one document are correlated: see bebop.losses.mean_with_error. If
an older policy sampled the text, each anchor is weighted by prod p(y) / p_r(y) over the draft tokens before depth j.
effective_sample_size is the number of equally weighted anchors with the same variance (Kish: (sum w)^2 / sum w^2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bebop.acceptance.scores import AnchorScores
from bebop.losses import mean_with_error


@dataclass(frozen=True)
class RuleAcceptance:
    """Under one rule: accepted [K] P(first j tokens accepted), the acceptance length, their standard errors (_se)."""

    accepted: tuple[float, ...]
    accepted_se: tuple[float, ...]
    acceptance_length: float
    acceptance_length_se: float


@dataclass(frozen=True)
class Acceptance:
    """Scored acceptance of a text. rules: by name of the rule. accepted, acceptance_length and their errors are those
    of rejection sampling."""

    temperature: float
    num_anchors: int
    num_documents: int  # documents with an anchor
    alpha: tuple[float, ...]  # [K] mean of sum_v min(p, q) at each depth
    accepted_product: tuple[float, ...]  # [K] mean product of alphas along the text: biased; what e2e_tv trains
    rejection_ahead: tuple[float, ...]  # [K] share of anchors where d_TV < 1 - p(argmax q): rejection beats target-only
    entropy_nats: float  # mean target entropy at the anchors' first depth
    effective_sample_size: tuple[float, ...]  # [K] in anchors
    rules: Mapping[str, RuleAcceptance]

    @property
    def accepted(self) -> tuple[float, ...]:
        return self.rules["rejection"].accepted

    @property
    def acceptance_length(self) -> float:
        return self.rules["rejection"].acceptance_length

    @property
    def acceptance_length_se(self) -> float:
        return self.rules["rejection"].acceptance_length_se

    @property
    def conditional(self) -> tuple[float, ...]:
        """[K] P(depth j accepted | depth j-1 accepted), under rejection sampling."""
        before = (1.0, *self.accepted[:-1])
        return tuple(a / b if b else 0.0 for a, b in zip(self.accepted, before, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """Flat mapping for records. Values of rules other than rejection sampling have the rule's name in their key."""
        values = asdict(self)
        for rule, of_rule in values.pop("rules").items():
            values |= {record_key(name, rule): value for name, value in of_rule.items()}
        return values | {
            "conditional": self.conditional,
            "acceptance_length_product": 1 + sum(self.accepted_product),
        }


def record_key(name: str, rule: str) -> str:
    """Key of a rule's value in Acceptance.as_dict: accepted_se, accepted_block_se, ..."""
    if rule == "rejection":
        return name
    error = "_se" if name.endswith("_se") else ""
    return f"{name.removesuffix('_se')}_{rule}{error}"


def summarise(scores: AnchorScores) -> Acceptance:
    """Means over all anchors, with errors over documents."""
    alpha, weight = scores.alpha.double(), scores.importance_before()
    rules = {}
    for name, accepted in scores.accepted.items():
        mean, error = mean_with_error(accepted, scores.document)
        length, length_error = mean_with_error(scores.length(name), scores.document)
        rules[name] = RuleAcceptance(tuple(mean.tolist()), tuple(error.tolist()), length.item(), length_error.item())
    return Acceptance(
        temperature=scores.temperature,
        num_anchors=len(scores.document),
        num_documents=len(scores.document.unique()),
        alpha=tuple(alpha.mean(1).tolist()),
        accepted_product=tuple(alpha.cumprod(0).mean(1).tolist()),
        rejection_ahead=tuple((scores.alpha > scores.target_prob_of_draft_argmax).double().mean(1).tolist()),
        entropy_nats=scores.entropy_nats.mean().item(),
        effective_sample_size=tuple((weight.sum(1).square() / weight.square().sum(1)).tolist()),
        rules=rules,
    )
