"""Loops over rows of logits, compiled by numba on first use and cached. bfloat16 arrives as bits in int16.

exp((z - m) / T) is 2^(d L) with d = z - m and L = log2(e) / T in two float32 parts: n = round(d L), f = d L - n by
fused multiply-adds, which round once, and a polynomial of degree 6 on [-1/2, 1/2]. The error is below 2 units in the
last place at any temperature. Sums are float32 over a run in many lanes, float64 over runs.

Every inner loop is elementwise, an integer maximum, or a sum that may be reordered, so LLVM vectorises it. All loops
are in one file because numba's cache notices changes only in the file of the cached function.

Shapes: draft, target [n, V]; saved [n, 5] as in overlap/cpu.py; high + low = log2(e) / T.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

TILE = 2048  # elements; the tiles of one backward step fit in the first-level cache
RUN = 256  # elements summed in float32, a few per lane; the remainder of a row is summed in float64

_f32, _i32 = np.float32, np.int32
_ROUND = _f32(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, held in the low bits
_SMALLEST = _f32(-125.0)  # smaller exponents give 0
# minimax polynomial of 2^f on [-1/2, 1/2], relative error 2e-9
_C1, _C2, _C3 = _f32(0.6931472028559714), _f32(0.24022647913499046), _f32(0.05550332469693551)
_C4, _C5, _C6 = _f32(0.00961843736641186), _f32(0.001339887486672343), _f32(0.00015353360632036378)


def scale_parts(temperature: float) -> tuple[np.float32, np.float32]:
    """log2(e) / T as the sum of two float32 numbers."""
    whole = np.log2(np.e) / temperature
    high = _f32(whole)
    return high, _f32(whole - float(high))


def _bitcast(source, result):
    @intrinsic
    def cast(typingctx, value):
        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], context.get_value_type(result))

        return result(source), codegen

    return cast


_to_bits = _bitcast(types.float32, types.int32)
_of_bits = _bitcast(types.int32, types.float32)


@intrinsic
def _fma(typingctx, a, b, c):
    def codegen(context, builder, signature, args):
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def _narrow(typingctx, value):
    """The low 16 bits of an int32."""

    def codegen(context, builder, signature, args):
        return builder.trunc(args[0], ir.IntType(16))

    return types.int16(types.int32), codegen


def _load(value):
    """An element as float32: unchanged, or from the bits of a bfloat16."""


@overload(_load, inline="always")
def _load_overload(value):
    if isinstance(value, types.Float):
        return lambda value: value
    return lambda value: _of_bits(_i32(value) << _i32(16))


def _store(value, out, j):
    """Write a float32 unchanged, or rounded to the bits of a bfloat16."""


@overload(_store, inline="always")
def _store_overload(value, out, j):
    if isinstance(out.dtype, types.Float):

        def keep(value, out, j):
            out[j] = value

        return keep

    def rounded(value, out, j):
        bits = _to_bits(value)
        out[j] = _narrow((bits + _i32(0x7FFF) + ((bits >> _i32(16)) & _i32(1))) >> _i32(16))

    return rounded


@njit(inline="always")
def _exp2(d, high, low):
    """2^(d (high + low)) for d <= 0, 0 for -inf, NaN for NaN."""
    k = _fma(d, high, _ROUND)
    n = k - _ROUND
    f = _fma(d, low, _fma(d, high, -n))
    p = _fma(_C6, f, _C5)
    p = _fma(p, f, _C4)
    p = _fma(p, f, _C3)
    p = _fma(p, f, _C2)
    p = _fma(p, f, _C1)
    p = _fma(p, f, _f32(1))
    power = _of_bits((_to_bits(k) << _i32(23)) + _i32(0x3F800000))
    return _f32(0) if n < _SMALLEST else p * power


@njit(nogil=True, error_model="numpy")
def peak(row):
    """(maximum, its first index) as float32 and int; +inf or NaN if the row holds one, -inf for an empty row."""
    best, where = _i32(-(2**31)), 0
    for a in range(0, len(row), TILE):
        tile = row[a : a + TILE]
        top = _i32(-(2**31))
        for j in range(len(tile)):
            # these integers have the order of the floats; NaN is above +inf
            bits = _to_bits(_load(tile[j]))
            top = max(top, bits ^ ((bits >> _i32(31)) & _i32(0x7FFFFFFF)))
        if top > best:
            best, where = top, a
    if best == _i32(-(2**31)):
        return _f32(-np.inf), 0
    value = _of_bits(best ^ ((best >> _i32(31)) & _i32(0x7FFFFFFF)))
    stop = min(where + TILE, len(row))
    while where < stop - 1 and _load(row[where]) != value:
        where += 1
    return value, where


@njit(nogil=True, error_model="numpy", fastmath={"reassoc", "nsz"})
def _sum_run(values, zero):
    total = zero
    for j in range(len(values)):
        total += values[j]
    return total


@njit(nogil=True, error_model="numpy")
def _sum(values):
    total = 0.0
    whole = len(values) // RUN * RUN
    for a in range(0, whole, RUN):
        total += _sum_run(values[a : a + RUN], _f32(0))
    return total + _sum_run(values[whole:], 0.0)


@njit(nogil=True, error_model="numpy")
def exponentials(row, maximum, high, low, out):
    """out = exp((row - maximum) / T)."""
    safe = _f32(0) if maximum == _f32(-np.inf) else maximum
    for j in range(len(row)):
        out[j] = _exp2(_load(row[j]) - safe, high, low)


@njit(nogil=True, error_model="numpy")
def softmax_parts(row, maximum, high, low, out):
    """Fill out [V] as `exponentials` does, and return the sum."""
    total = 0.0
    for a in range(0, len(row), TILE):
        tile = out[a : a + TILE]
        exponentials(row[a : a + TILE], maximum, high, low, tile)
        total += _sum(tile)
    return total


@njit(nogil=True, error_model="numpy")
def over(total):
    """1 / total, or 0 for an empty row; NaN stays NaN."""
    return 0.0 if total == 0.0 else 1.0 / total


@njit(nogil=True, error_model="numpy", fastmath={"reassoc", "nsz"})
def _compare_run(q, q_scale, p, p_scale, zero):
    under, above, lesser = zero, zero, zero
    for j in range(len(q)):
        # a factor, because LLVM does not vectorise a conditional sum
        is_over = _f32(q[j] * q_scale > p[j] * p_scale)
        under += q[j] * (_f32(1) - is_over)
        above += q[j] * is_over
        lesser += p[j] * is_over
    return under, above, lesser


@njit(nogil=True, error_model="numpy")
def compare(q, q_inverse, p, p_inverse):
    """(sum min(q, p), sum of q where q > p), from exponentials and their 1 / Z.

    Exponentials are summed, so rounding 1 / Z for the comparison does not change the sums.
    """
    q_scale, p_scale = _f32(q_inverse), _f32(p_inverse)
    under, above, lesser = 0.0, 0.0, 0.0
    whole = len(q) // RUN * RUN
    for a in range(0, whole, RUN):
        x, y, z = _compare_run(q[a : a + RUN], q_scale, p[a : a + RUN], p_scale, _f32(0))
        under += x
        above += y
        lesser += z
    x, y, z = _compare_run(q[whole:], q_scale, p[whole:], p_scale, 0.0)
    under, above, lesser = under + x, above + y, lesser + z
    return under * q_inverse + lesser * p_inverse, above * q_inverse


@njit(nogil=True, error_model="numpy")
def slope(q, q_scale, p, p_scale, mass, factor, out):
    """out = factor q (mass - [q > p]), the gradient of the overlap. out may be the logits of q or p."""
    for j in range(len(q)):
        a, b = q[j] * q_scale, p[j] * p_scale
        _store(a * (mass - (_f32(1) if a > b else _f32(0))) * factor, out, j)


@njit(nogil=True, error_model="numpy")
def mean_shift(e, row, maximum, scratch):
    """sum e (row - maximum), in which terms with e = 0 are 0; scratch [TILE]."""
    total = 0.0
    for a in range(0, len(e), TILE):
        weight, tile = e[a : a + TILE], row[a : a + TILE]
        terms = scratch[: len(tile)]
        for j in range(len(tile)):
            terms[j] = weight[j] * (_load(tile[j]) - maximum) if weight[j] != _f32(0) else _f32(0)
        total += _sum(terms)
    return total


@njit(nogil=True, error_model="numpy")
def mean_difference(e, row, maximum, other, other_maximum, scratch):
    """sum e ((row - maximum) - (other - other_maximum)), in which terms with e = 0 are 0; scratch [TILE]."""
    total = 0.0
    for a in range(0, len(e), TILE):
        weight, tile, second = e[a : a + TILE], row[a : a + TILE], other[a : a + TILE]
        terms = scratch[: len(tile)]
        for j in range(len(tile)):
            d = (_load(tile[j]) - maximum) - (_load(second[j]) - other_maximum)
            terms[j] = weight[j] * d if weight[j] != _f32(0) else _f32(0)
        total += _sum(terms)
    return total


@njit(nogil=True, error_model="numpy", cache=True)
def overlap(draft, target, high, low, alpha, saved):
    """alpha [n] and saved, for whole rows."""
    width = draft.shape[1]
    q, p = np.empty(width, _f32), np.empty(width, _f32)
    for n in range(draft.shape[0]):
        saved[n, 0] = peak(draft[n])[0]
        q_inverse = over(softmax_parts(draft[n], saved[n, 0], high, low, q))
        saved[n, 1] = peak(target[n])[0]
        p_inverse = over(softmax_parts(target[n], saved[n, 1], high, low, p))
        saved[n, 2], saved[n, 3] = q_inverse, p_inverse
        alpha[n], saved[n, 4] = compare(q, q_inverse, p, p_inverse)


@njit(nogil=True, error_model="numpy", cache=True)
def gradient(draft, target, high, low, saved, factor, out):
    """out [n, V] = factor[n] times the gradient of alpha on the scaled logits; out may be draft."""
    width = draft.shape[1]
    q, p = np.empty(TILE, _f32), np.empty(TILE, _f32)
    for n in range(draft.shape[0]):
        for a in range(0, width, TILE):
            b = min(a + TILE, width)
            x, y = q[: b - a], p[: b - a]
            exponentials(draft[n, a:b], saved[n, 0], high, low, x)
            exponentials(target[n, a:b], saved[n, 1], high, low, y)
            slope(x, saved[n, 2], y, saved[n, 3], saved[n, 4], factor[n], out[n, a:b])


@njit(nogil=True, error_model="numpy", cache=True)
def probabilities(logits, high, low, probs, stats):
    """probs [n, V] float32 and 1 / Z [n] of each row."""
    for n in range(logits.shape[0]):
        scale = _f32(over(softmax_parts(logits[n], peak(logits[n])[0], high, low, probs[n])))
        stats[n] = scale
        for j in range(probs.shape[1]):
            probs[n, j] *= scale


@njit(nogil=True, error_model="numpy", cache=True)
def linear_overlap(draft, probs, index, high, low, scale, want_grad, alpha, inverse):
    """alpha [n] of rows against probs[index], and 1 / Z in inverse [n]. With want_grad, draft becomes scale times the
    gradient."""
    q = np.empty(draft.shape[1], _f32)
    one = _f32(1)
    for n in range(draft.shape[0]):
        p = probs[index[n]]
        q_inverse = over(softmax_parts(draft[n], peak(draft[n])[0], high, low, q))
        inverse[n] = q_inverse
        alpha[n], mass = compare(q, q_inverse, p, 1.0)
        if want_grad:
            slope(q, _f32(q_inverse), p, one, _f32(mass), scale[n], draft[n])


@njit(nogil=True, error_model="numpy")
def _logprob(logit, maximum, temperature, log_sum):
    return -np.inf if logit == -np.inf else (logit - maximum) / temperature - log_sum


@njit(nogil=True, error_model="numpy", cache=True)
def statistics(draft, target, tokens, high, low, temperature, fields):
    """fields [n, 9]: TvStatistics in its order, then 1 / Z of draft and target. tokens [n], or [0] for none."""
    width = draft.shape[1]
    q, p, scratch = np.empty(width, _f32), np.empty(width, _f32), np.empty(TILE, _f32)
    for n in range(draft.shape[0]):
        q_top, chosen = peak(draft[n])
        p_top, _ = peak(target[n])
        q_sum = softmax_parts(draft[n], q_top, high, low, q)
        p_sum = softmax_parts(target[n], p_top, high, low, p)
        q_scale, p_scale = over(q_sum), over(p_sum)
        log_q, log_p = np.log(q_sum), np.log(p_sum)
        fields[n, 0] = min(compare(q, q_scale, p, p_scale)[0], 1.0)
        fields[n, 3] = p[chosen] * p_scale
        if p_scale > 0:
            fields[n, 1] = log_p - mean_shift(p, target[n], p_top, scratch) / p_sum / temperature
        else:
            fields[n, 1] = 0.0
        if q_scale > 0:
            fields[n, 2] = log_q - mean_shift(q, draft[n], q_top, scratch) / q_sum / temperature
        else:
            fields[n, 2] = 0.0
        if p_scale == 0:
            fields[n, 4] = 0.0
        elif q_scale == 0:
            fields[n, 4] = np.inf
        else:
            cross = mean_difference(p, target[n], p_top, draft[n], q_top, scratch) / p_sum / temperature
            fields[n, 4] = max(cross - log_p + log_q, 0.0)
        if len(tokens):
            fields[n, 5] = _logprob(_load(target[n, tokens[n]]), p_top, temperature, log_p)
            fields[n, 6] = _logprob(_load(draft[n, tokens[n]]), q_top, temperature, log_q)
        fields[n, 7], fields[n, 8] = q_scale, p_scale
