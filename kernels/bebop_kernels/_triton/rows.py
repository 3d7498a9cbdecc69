"""Row kernels in Triton: programs sweep tiles of the vocabulary; accumulators are float32 whatever the logits are.

| kernel          | reads                | writes                                                         |
|-----------------|----------------------|----------------------------------------------------------------|
| row_sums        | one row or both      | per row and split: max z, sum exp((z - max z) / T)             |
| merge_sums      | those                | the same for the whole row                                     |
| row_overlap     | both rows, the sums  | per row and split: sum min(p, q), S = sum of q where q > p     |
| row_gradient    | both rows, sums, S   | q (S - [q > p]) g, rounded once to the logits' type            |
| row_statistics  | both rows, the sums  | per row and split: overlap, entropies, KL, argmax of the draft |

A log-probability, in base 2 so that exp2 needs no product, is `fma(z - max z, log2(e) / T, -log2 Z)`. Maximum and
log-sum stay separate: z - max z is exact where the comparison q > p is close, while max z + log Z would round to the
size of z and flip many comparisons under a common shift of 1000. The fused product is explicit, so that forward and
backward compare the same bits.

Probabilities are 2^((z - max z) log2(e) / T) / Z. For float32 logits, `_power` adds back what the product rounds away,
which would cost |z - max z| / T units of 2^-24. Logits of 16 bits do not have these digits, and their gradient is
rounded to as few. Row offsets are int64. If there are few rows, each is split over several programs and its parts are
merged in order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from bebop_kernels._triton import interpreter

if knobs.runtime.interpret:
    interpreter.round_bfloat16()

LN2 = tl.constexpr(0.6931471805599453)
INT32_MAX = tl.constexpr(2147483647)


@triton.jit
def _safe(peak):
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _load(pointer, columns, vocab_size):
    return tl.load(pointer + columns, mask=columns < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def _normaliser(sums, row, stride):
    """Safe maximum, log2 of the sum, and 1 / sum (0, 0 and 1 for a row of -inf)."""
    pointer = sums + row * stride
    total = tl.load(pointer + 1)
    total = tl.where(total == 0, 1.0, total)
    return _safe(tl.load(pointer)), tl.log2(total), 1.0 / total


@triton.constexpr_function
def _is_float32(first, second):
    return tl.float32 in (first.dtype.element_ty, second.dtype.element_ty)


@triton.jit
def _power(distance, scale, scale_low, EXACT: tl.constexpr):
    """2^(distance (scale + scale_low)) for distance <= 0, 0 for -inf. EXACT corrects the rounding of the product."""
    if not EXACT:
        return tl.exp2(distance * scale)
    distance = tl.where(distance < -1e30, -1e30, distance)  # -inf would become NaN below; NaN stays NaN
    product = distance * scale
    rest = tl.fma(distance, scale_low, tl.fma(distance, scale, -product))
    power = tl.exp2(product)
    return tl.fma(power * rest, LN2, power)


@triton.jit
def _log2_and_prob(logits, peak, log_sum, inverse_sum, scale, scale_low, EXACT: tl.constexpr):
    """The logarithm, for comparisons, and the probability, computed without it: the log-sum is rounded."""
    distance = logits - peak
    return tl.fma(distance, scale, -log_sum), _power(distance, scale, scale_low, EXACT) * inverse_sum


@triton.jit
def _add_tile(logits, peak, total, scale, scale_low, EXACT: tl.constexpr):
    """Maximum (a scalar) and sums (one per lane) after another tile."""
    new = tl.maximum(peak, tl.max(logits, 0))
    keep = _power(peak - _safe(new), scale, scale_low, EXACT)
    return new, total * keep + _power(logits - _safe(new), scale, scale_low, EXACT)


@triton.jit
def row_sums(
    first,
    second,
    out,
    vocab_size,
    first_stride,
    second_stride,
    span,
    scale,
    scale_low,
    BOTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out [splits, rows, 2 or 4]: max and sum of `first`, then of `second` if BOTH. Grid (rows, splits)."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    exact: tl.constexpr = _is_float32(first, second)
    first += row * first_stride
    second += row * second_stride
    peak, peak_2 = float("-inf"), float("-inf")
    total = tl.zeros([COLUMNS], tl.float32)
    total_2 = tl.zeros([COLUMNS], tl.float32)
    for start in range(split * span, tl.minimum(split * span + span, vocab_size), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        peak, total = _add_tile(_load(first, columns, vocab_size), peak, total, scale, scale_low, exact)
        if BOTH:
            peak_2, total_2 = _add_tile(_load(second, columns, vocab_size), peak_2, total_2, scale, scale_low, exact)
    width: tl.constexpr = 4 if BOTH else 2
    out += (split * tl.num_programs(0).to(tl.int64) + row) * width
    tl.store(out, peak)
    tl.store(out + 1, tl.sum(total, 0))
    if BOTH:
        tl.store(out + 2, peak_2)
        tl.store(out + 3, tl.sum(total_2, 0))


@triton.jit
def merge_sums(parts, out, num_parts, num_pairs, pairs_per_row, out_stride, scale, scale_low, ROWS: tl.constexpr):
    """Merge pairs (max, sum) of parts [num_parts, num_pairs, 2], in order, into rows of `out`. Grid (pairs / ROWS)."""
    pair = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    alive = pair < num_pairs
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for part in range(num_parts):
        pointer = parts + (part * num_pairs + pair) * 2
        peak_2 = tl.load(pointer, mask=alive, other=float("-inf"))
        total_2 = tl.load(pointer + 1, mask=alive, other=0.0)
        new = tl.maximum(peak, peak_2)
        total *= _power(peak - _safe(new), scale, scale_low, True)
        total += total_2 * _power(peak_2 - _safe(new), scale, scale_low, True)
        peak = new
    out += pair // pairs_per_row * out_stride + pair % pairs_per_row * 2
    tl.store(out, peak, mask=alive)
    tl.store(out + 1, total, mask=alive)


@triton.jit
def row_overlap(
    draft,
    target,
    index,
    draft_sums,
    target_sums,
    out,
    vocab_size,
    draft_stride,
    target_stride,
    draft_sums_stride,
    target_sums_stride,
    span,
    scale,
    scale_low,
    INDEXED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out [splits, rows, 2]: overlap and S. The target row is index[row] if INDEXED, else row. Grid (rows, splits)."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    target_row = tl.load(index + row) if INDEXED else row
    peak_q, log_q, inverse_q = _normaliser(draft_sums, row, draft_sums_stride)
    peak_p, log_p, inverse_p = _normaliser(target_sums, target_row, target_sums_stride)
    exact: tl.constexpr = _is_float32(draft, target)
    draft += row * draft_stride
    target += target_row * target_stride
    overlap = tl.zeros([COLUMNS], tl.float32)
    over_mass = tl.zeros([COLUMNS], tl.float32)
    for start in range(split * span, tl.minimum(split * span + span, vocab_size), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        q, prob_q = _log2_and_prob(_load(draft, columns, vocab_size), peak_q, log_q, inverse_q, scale, scale_low, exact)
        p, prob_p = _log2_and_prob(
            _load(target, columns, vocab_size), peak_p, log_p, inverse_p, scale, scale_low, exact
        )
        overlap += tl.minimum(prob_q, prob_p)
        over_mass += tl.where(q > p, prob_q, 0.0)
    out += (split * tl.num_programs(0).to(tl.int64) + row) * 2
    tl.store(out, tl.sum(overlap, 0))
    tl.store(out + 1, tl.sum(over_mass, 0))


@triton.jit
def row_gradient(
    draft,
    target,
    index,
    draft_sums,
    target_sums,
    over_mass,
    row_scale,
    out,
    vocab_size,
    draft_stride,
    target_stride,
    draft_sums_stride,
    target_sums_stride,
    over_mass_stride,
    out_stride,
    span,
    scale,
    scale_low,
    out_scale,
    INDEXED: tl.constexpr,
    SCALED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out [rows, V] = q (S - [q > p]) * out_scale, times row_scale[row] if SCALED. `out` may be `draft`.
    Grid (rows, splits)."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    target_row = tl.load(index + row) if INDEXED else row
    peak_q, log_q, inverse_q = _normaliser(draft_sums, row, draft_sums_stride)
    peak_p, log_p, inverse_p = _normaliser(target_sums, target_row, target_sums_stride)
    over = tl.load(over_mass + row * over_mass_stride)
    factor = out_scale
    if SCALED:
        factor = tl.load(row_scale + row) * out_scale
    exact: tl.constexpr = _is_float32(draft, target)
    draft += row * draft_stride
    target += target_row * target_stride
    out += row * out_stride
    for start in range(split * span, tl.minimum(split * span + span, vocab_size), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        q, prob_q = _log2_and_prob(_load(draft, columns, vocab_size), peak_q, log_q, inverse_q, scale, scale_low, exact)
        p, _ = _log2_and_prob(_load(target, columns, vocab_size), peak_p, log_p, inverse_p, scale, scale_low, exact)
        gradient = prob_q * tl.where(q > p, over - 1.0, over) * factor
        tl.store(out + columns, gradient.to(out.dtype.element_ty), mask=columns < vocab_size)


@triton.jit
def row_statistics(
    draft,
    target,
    sums,
    out,
    best,
    vocab_size,
    draft_stride,
    target_stride,
    span,
    scale,
    scale_low,
    COLUMNS: tl.constexpr,
):
    """out [splits, rows, 4]: overlap, -sum p log2 p, -sum q log2 q, sum p log2(p / q). best [splits, rows]: the first
    column with the draft's maximum, or INT32_MAX. sums [rows, 4]. Grid (rows, splits)."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    peak_q, log_q, inverse_q = _normaliser(sums, row, 4)
    peak_p, log_p, inverse_p = _normaliser(sums + 2, row, 4)
    exact: tl.constexpr = _is_float32(draft, target)
    draft += row * draft_stride
    target += row * target_stride
    overlap = tl.zeros([COLUMNS], tl.float32)
    entropy_p = tl.zeros([COLUMNS], tl.float32)
    entropy_q = tl.zeros([COLUMNS], tl.float32)
    divergence = tl.zeros([COLUMNS], tl.float32)
    first = tl.full([COLUMNS], INT32_MAX, tl.int32)
    for start in range(split * span, tl.minimum(split * span + span, vocab_size), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        logits_q = _load(draft, columns, vocab_size)
        q, prob_q = _log2_and_prob(logits_q, peak_q, log_q, inverse_q, scale, scale_low, exact)
        p, prob_p = _log2_and_prob(
            _load(target, columns, vocab_size), peak_p, log_p, inverse_p, scale, scale_low, exact
        )
        overlap += tl.minimum(prob_q, prob_p)
        # Where a probability is 0, its term is 0 whatever the logarithm.
        entropy_p -= tl.where(prob_p > 0, prob_p * p, 0.0)
        entropy_q -= tl.where(prob_q > 0, prob_q * q, 0.0)
        divergence += tl.where(prob_p > 0, prob_p * (p - q), 0.0)
        first = tl.minimum(first, tl.where((logits_q == peak_q) & (columns < vocab_size), columns, INT32_MAX))
    place = split * tl.num_programs(0).to(tl.int64) + row
    tl.store(best + place, tl.min(first, 0))
    out += place * 4
    tl.store(out, tl.sum(overlap, 0))
    tl.store(out + 1, tl.sum(entropy_p, 0))
    tl.store(out + 2, tl.sum(entropy_q, 0))
    tl.store(out + 3, tl.sum(divergence, 0))
