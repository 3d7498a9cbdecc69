"""The exact law of what draft trees emit, in float64, by driving bebop.spec's own growing and verifying.

Every probe draw is enumerated: each assignment of tokens to the probes becomes one row of a batch, its uniform numbers
put into the middle of the tokens' CDF intervals. So is every choice at every node: accept, reject and each token after
it. verify_trees then runs once on all of them, and what it emits gets the mass of its branch.

Legend: A assignments, N nodes, D depth, V vocabulary. A text of n tokens is written as one number in base V.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bebop.spec import TreeBatch, TreeGrower, TreeSpec, verify_trees
from bebop.spec.random import StreamId
from bebop.spec.tree.verify import child_with_token, node_law


@dataclass(frozen=True)
class Model:
    """draft[d] logits and target[d] probabilities [V^d, V] after every text of d tokens; D and D + 1 tables."""

    draft: list[Tensor]
    target: list[Tensor]

    @property
    def vocabulary(self) -> int:
        return self.target[0].shape[1]


@dataclass(frozen=True)
class Law:
    """emitted[n]: mass of every emitted text of n + 1 tokens, [V^(n+1)]. num_branches: enumerated in all."""

    emitted: list[Tensor]
    target: list[Tensor]
    num_branches: int

    @property
    def total_variation(self) -> float:
        """Between the first D + 1 tokens and the target's, shorter texts going on by sampling the target."""
        mass, joint = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        for emitted, target in zip(self.emitted, self.target, strict=True):
            mass = (mass.unsqueeze(1) * target).flatten() + emitted
            joint = (joint.unsqueeze(1) * target).flatten()
        return float((mass - joint).abs().sum() / 2)

    @property
    def acceptance_length(self) -> float:
        return sum(float(mass.sum()) * (n + 1) for n, mass in enumerate(self.emitted))

    @property
    def root_acceptance(self) -> float:
        """Probability that the root's choice is one of its children."""
        return 1.0 - float(self.emitted[0].sum())


@dataclass(frozen=True)
class Fixed:
    """Given uniform numbers: one tensor per stream, depth along the last axis or in a list."""

    numbers: dict[StreamId, list[Tensor] | dict[int, Tensor]]

    def uniforms(self, stream: StreamId, depth: int, *, rows: int | None = None) -> Tensor:
        return self.numbers[stream][depth]


def grow(model: Model, spec: TreeSpec, uniforms: dict[int, Tensor], temperature: float, levels: int) -> tuple:
    """A grower with `levels` levels below the root, and the texts of its frontier, [A, W]."""
    grower = TreeGrower(spec, Fixed({StreamId.DRAFT: uniforms}), temperature=temperature)
    texts = torch.zeros(len(uniforms[0]) if uniforms else 1, 1, dtype=torch.long)
    for level in range(levels):
        grower.expand(model.draft[level][texts])
        if grower.frontier is not None:
            texts = texts.gather(1, grower.frontier.parent_rows) * model.vocabulary + grower.frontier.tokens
    return grower, texts


def probe_law(logits: Tensor, spec: TreeSpec, temperature: float) -> Tensor:
    """Probability of each rank as a probe, by the definition: [..., V] logits -> [..., S], all 0 without a probe."""
    size = min(spec.support, logits.shape[-1])
    ranked = logits.sort(dim=-1, descending=True, stable=True).values[..., :size]
    leads = int(spec.leads_at(torch.tensor(temperature)))
    if temperature == 0:
        q = torch.zeros_like(ranked)
        q[..., 0] = 1.0
    else:
        q = (ranked / temperature).softmax(-1)
    q[..., :leads] = 0.0
    mass = q.sum(-1, keepdim=True)
    return torch.where(mass > 0, q / mass, 0.0)


def all_trees(model: Model, spec: TreeSpec, temperature: float) -> tuple[TreeBatch, Tensor]:
    """Every tree that can be drafted, [A], with its probability, [A]."""
    uniforms: dict[int, Tensor] = {}
    mass = torch.ones(1, dtype=torch.float64)
    for level in range(spec.depth):
        grower, texts = grow(model, spec, uniforms, temperature, level)
        valid = grower.frontier.valid.expand(texts.shape)
        law = probe_law(model.draft[level][texts], spec, temperature) * valid.unsqueeze(-1)
        if spec.method == "topk":
            law = law * 0
        chosen = torch.empty(len(mass), 0, dtype=torch.float64)
        for node in range(law.shape[1]):
            there = law[:, node].clone()
            there[:, 0] += there.sum(-1) == 0  # no draw: one branch of probability 1
            branch, rank = (there > 0).nonzero(as_tuple=True)
            probability = there[branch, rank]
            middle = there[branch].cumsum(-1)[torch.arange(len(branch)), rank] - probability / 2
            chosen, mass = torch.cat([chosen[branch], middle.unsqueeze(1)], dim=1), mass[branch] * probability
            law = law[branch]
            uniforms = {address: u[branch] for address, u in uniforms.items()}
        uniforms[level] = chosen
    grower, _ = grow(model, spec, uniforms, temperature, spec.depth)
    trees = grower.finish()
    if len(trees.tokens) != len(mass):  # nothing depends on a draw
        raise AssertionError(f"{len(trees.tokens)} trees for {len(mass)} assignments")
    return trees, mass


def target_rows(model: Model, trees: TreeBatch) -> Tensor:
    """[A, N+1, V]: the target after the root and after every node."""
    num = trees.tokens.shape[1]
    texts = torch.zeros(len(trees.tokens), num + 1, dtype=torch.long)
    rows = torch.zeros(*texts.shape, model.vocabulary, dtype=torch.float64)
    rows[:, 0], rows[:, 1:] = model.target[0][0], model.target[0][0]
    for depth in range(1, len(model.target)):
        below = texts.gather(1, trees.parents + 1) * model.vocabulary + trees.tokens.clamp(min=0)
        here = trees.depths == depth
        texts[:, 1:] = torch.where(here, below, texts[:, 1:])
        rows[:, 1:] = torch.where(here.unsqueeze(-1), model.target[depth][texts[:, 1:] * here], rows[:, 1:])
    return rows


def select(trees: TreeBatch, rows: Tensor) -> TreeBatch:
    return replace(trees, **{name: value[rows] for name, value in vars(trees).items() if isinstance(value, Tensor)})


def emitted_law(model: Model, spec: TreeSpec, *, temperature: float = 1.0) -> Law:
    """The law of what grow and verify emit together."""
    trees, mass = all_trees(model, spec, temperature)
    targets = target_rows(model, trees)
    tree, at = torch.arange(len(mass)), torch.zeros(len(mass), dtype=torch.long)
    numbers = {stream: torch.empty(len(mass), 0, dtype=torch.float64) for stream in StreamId}
    done: list[tuple[Tensor, Tensor, dict[StreamId, Tensor]]] = []
    for _ in range(spec.depth + 1):
        parts = _branches(select(trees, tree), at, targets[tree, at])
        came = torch.cat([branch for branch, *_ in parts])
        mass = mass[came] * torch.cat([chance for _, chance, *_ in parts])
        drawn = {stream: torch.cat([part[3][stream] for part in parts]) for stream in (*numbers,)}
        numbers = {stream: torch.cat([numbers[stream][came], drawn[stream].unsqueeze(1)], 1) for stream in numbers}
        tree, child = tree[came], torch.cat([part[2] for part in parts])
        ends = child < 0
        done.append((tree[ends], mass[ends], {stream: value[ends] for stream, value in numbers.items()}))
        numbers = {stream: value[~ends] for stream, value in numbers.items()}
        tree, mass, at = tree[~ends], mass[~ends], child[~ends] + 1
    if len(tree):
        raise AssertionError("a path goes on below the deepest level")

    tree, mass = torch.cat([part[0] for part in done]), torch.cat([part[1] for part in done])
    draws = {}
    for stream in numbers:
        parts = [numbers_there[stream] for _, _, numbers_there in done]
        padded = [torch.cat([part, part.new_zeros(len(part), spec.depth + 1 - part.shape[1])], 1) for part in parts]
        draws[stream] = list(torch.cat(padded).unbind(1))
    result = verify_trees(select(trees, tree), lambda at: targets[tree, at], draws=Fixed(draws))
    emitted, texts = [], torch.zeros(len(tree), dtype=torch.long)
    for n in range(spec.depth + 1):
        table = torch.zeros(model.vocabulary ** (n + 1), dtype=torch.float64)
        if n < result.tokens.shape[1]:
            texts = texts * model.vocabulary + result.tokens[:, n].clamp(min=0)
            here = result.num_accepted == n
            table.index_add_(0, texts[here], mass[here])
        emitted.append(table)
    return Law(emitted, model.target, len(tree))


def _branches(
    trees: TreeBatch, at: Tensor, target: Tensor
) -> list[tuple[Tensor, Tensor, Tensor, dict[StreamId, Tensor]]]:
    """Every outcome at a node of each row: (row, probability, child or -1, the numbers that lead there)."""
    law = node_law(trees, at, target)
    half = torch.full_like(target[:, 0], 0.5)
    not_lead, lead_number, parts = torch.ones_like(half), half, []
    if law.leads is not None:
        middle = target.cumsum(-1) - target / 2
        not_lead = 1.0 - law.leads.sum(-1)
        other = (target * (law.leads == 0)).argmax(-1)
        lead_number = middle.gather(1, other.unsqueeze(1)).squeeze(1)
        row, token = (law.leads > 0).nonzero(as_tuple=True)
        child = child_with_token(select(trees, row), at[row], token)
        numbers = {
            StreamId.LEAD: middle[row, token],
            StreamId.ACCEPT: (1.0 + law.accept[row]) / 2,
            StreamId.FINAL: half[row],
        }
        parts.append((row, law.leads[row, token], child, numbers))
        not_lead = torch.where((target * (law.leads == 0)).sum(-1) > 0, not_lead, 0.0)
    accept, rejects = law.accept, (1.0 + law.accept) / 2  # a number that rejects the probe
    row = ((accept > 0) & (not_lead > 0)).nonzero().squeeze(1)
    numbers = {StreamId.LEAD: lead_number[row], StreamId.ACCEPT: accept[row] / 2, StreamId.FINAL: half[row]}
    parts.append((row, (not_lead * accept)[row], law.probe[row], numbers))
    rejected = not_lead * (1.0 - accept)
    row, token = ((law.residual > 0) & (rejected > 0).unsqueeze(1)).nonzero(as_tuple=True)
    middle = law.residual.cumsum(-1) - law.residual / 2
    child = child_with_token(select(trees, row), at[row], token)
    numbers = {StreamId.LEAD: lead_number[row], StreamId.ACCEPT: rejects[row], StreamId.FINAL: middle[row, token]}
    parts.append((row, rejected[row] * law.residual[row, token], child, numbers))
    return [(row, chance, child, {StreamId.DRAFT: half[row], **numbers}) for row, chance, child, numbers in parts]


def random_model(vocabulary: int, depth: int, seed: int, draft: str = "dense", target: str = "dense") -> Model:
    """Tables of one kind each: dense, ties, zeros, one_hot, peaked; target "draft": the draft's own softmax."""
    generator = torch.Generator().manual_seed(seed)

    def logits(kind: str, rows: int) -> Tensor:
        values = torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64) * 1.5
        if kind == "ties":
            values = torch.randint(0, 2, values.shape, generator=generator).double()
        elif kind == "zeros":
            off = torch.rand(values.shape, generator=generator) < 0.5
            off[torch.arange(rows), torch.randint(0, vocabulary, (rows,), generator=generator)] = False
            values = torch.where(off, -torch.inf, values)
        elif kind == "one_hot":
            values = torch.where(values == values.amax(-1, keepdim=True), 0.0, -torch.inf)
        elif kind == "peaked":
            values = values * 8
        return values

    drafts = [logits(draft, vocabulary**d) for d in range(depth)]
    if target == "draft":
        targets = [table.softmax(-1) for table in drafts] + [logits("dense", vocabulary**depth).softmax(-1)]
    else:
        targets = [logits(target, vocabulary**d).softmax(-1) for d in range(depth + 1)]
    return Model(drafts, targets)
