"""The loops of cpu.py, compiled by numba on first use and cached. They use integers only: the bits of the floats.

bits & magnitude, negated if the sign bit is set, has the order of the floats and one value for both zeros. The
magnitude of a NaN is above that of infinity. The inner loops have no branch on data, except one that is rarely taken:
logits differ from call to call, and a mispredicted branch costs more than a dozen elements.
"""

from __future__ import annotations

import numpy as np
from numba import njit

CHUNK = 32  # elements
FEW = 512  # up to this many keys, counting the smaller keys for each beats a sort

_i32 = np.int32


@njit(nogil=True, error_model="numpy")
def _largest(chunk, magnitude):
    """The largest element of a chunk in the order of floats, and the largest magnitude."""
    best, most = _i32(-magnitude), _i32(0)
    for j in range(len(chunk)):
        size = _i32(_i32(chunk[j]) & magnitude)
        best = max(best, size if chunk[j] >= 0 else _i32(-size))
        most = max(most, size)
    return best, most


@njit(nogil=True, error_model="numpy")
def _at_least(values, bound):
    count = _i32(0)
    for i in range(len(values)):
        count += _i32(values[i] >= bound)
    return count


@njit(nogil=True, error_model="numpy")
def _bound(values, k, magnitude):
    """The k-th largest value, by bisection: the largest integer that k values reach."""
    low, high = np.int64(-magnitude), np.int64(magnitude)  # at least k values reach low
    while low < high:
        middle = low + (high - low + 1) // 2
        if _at_least(values, _i32(middle)) >= k:
            low = middle
        else:
            high = middle - 1
    return _i32(low)


@njit(nogil=True, error_model="numpy")
def _first(keys, k, ids):
    """The low halves of the k smallest keys, in order. No two keys are equal."""
    if len(keys) > FEW:
        keys = np.sort(keys)
        for i in range(k):
            ids[i] = keys[i] & 0xFFFFFFFF
        return
    for i in range(len(keys)):
        key, ahead = keys[i], 0
        for j in range(len(keys)):
            ahead += keys[j] < key
        if ahead < k:
            ids[ahead] = key & 0xFFFFFFFF


@njit(nogil=True, error_model="numpy", cache=True)
def topk(rows, magnitude, infinity, k, ids, has_nan):
    """ids [n, k] of each row's top k, by (value, then lowest id); has_nan [n].

    rows [n, V]: bits of bfloat16 or float32; V >= CHUNK k. The k-th largest of the chunks' maxima is a bound that at
    least k elements reach, so the top k are among those: the elements above it, which lie in fewer than k chunks, and
    the first k elements equal to it, which have the lowest ids because chunks are read in order.
    """
    width = rows.shape[1]
    count = -(-width // CHUNK)
    tops = np.empty(count, _i32)
    keys = np.empty((CHUNK + 1) * k, np.int64)
    for r in range(rows.shape[0]):
        row, most = rows[r], _i32(0)
        for c in range(count):
            tops[c], size = _largest(row[c * CHUNK : min((c + 1) * CHUNK, width)], magnitude)
            most = max(most, size)
        has_nan[r] = most > infinity
        bound = _bound(tops, k, magnitude)
        kept, equal = 0, 0
        for c in range(count):
            if tops[c] < bound:
                continue
            for j in range(c * CHUNK, min((c + 1) * CHUNK, width)):
                size = _i32(_i32(row[j]) & magnitude)
                value = size if row[j] >= 0 else _i32(-size)
                if value > bound or (value == bound and equal < k):  # one in twenty
                    equal += value == bound
                    keys[kept] = (-np.int64(value) << 32) + j
                    kept += 1
        _first(keys[:kept], k, ids[r])
