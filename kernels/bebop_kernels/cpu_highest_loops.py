"""The loops of cpu_highest, compiled by numba at first use and cached: on integers alone, the bits of the floats.

bits & magnitude, negated where the sign bit is set, has the order of the floats and one value for both zeros; a NaN's
magnitude is above that of infinity. But for one that is rarely taken, the inner loops have no branch on data: logits
differ from call to call, and a mispredicted branch costs more than a dozen elements.
"""

from __future__ import annotations

import numpy as np
from numba import njit

CHUNK = 32  # elements
FEW = 512  # up to here counting who is ahead, for each, beats a sort

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
def _bound(values, num, magnitude):
    """The largest integer that `num` values reach, by bisection: the num-th largest of them."""
    low, high = np.int64(-magnitude), np.int64(magnitude)  # low is reached
    while low < high:
        middle = low + (high - low + 1) // 2
        if _at_least(values, _i32(middle)) >= num:
            low = middle
        else:
            high = middle - 1
    return _i32(low)


@njit(nogil=True, error_model="numpy")
def _first(keys, num, ids):
    """The low halves of the `num` smallest keys in order; no two are equal."""
    if len(keys) > FEW:
        keys = np.sort(keys)
        for i in range(num):
            ids[i] = keys[i] & 0xFFFFFFFF
        return
    for i in range(len(keys)):
        key, ahead = keys[i], 0
        for j in range(len(keys)):
            ahead += keys[j] < key
        if ahead < num:
            ids[ahead] = key & 0xFFFFFFFF


@njit(nogil=True, error_model="numpy", cache=True)
def highest(rows, magnitude, infinity, num, ids, broken):
    """ids [n, num] of each row's highest, by (value, then lowest id); broken [n]: whether it holds NaN.

    rows [n, V]: bits of bfloat16 or float32; V >= CHUNK num. The num-th largest of the chunks' largest is a bound that
    num elements reach at least, so the highest lie among those that reach it: of those equal to it the first num, which
    are the lowest ids since chunks are read in order, and the others, which lie in fewer than num chunks.
    """
    width = rows.shape[1]
    count = -(-width // CHUNK)
    tops = np.empty(count, _i32)
    keys = np.empty((CHUNK + 1) * num, np.int64)
    for r in range(rows.shape[0]):
        row, most = rows[r], _i32(0)
        for c in range(count):
            tops[c], size = _largest(row[c * CHUNK : min((c + 1) * CHUNK, width)], magnitude)
            most = max(most, size)
        broken[r] = most > infinity
        bound = _bound(tops, num, magnitude)
        found, equal = 0, 0
        for c in range(count):
            if tops[c] < bound:
                continue
            for j in range(c * CHUNK, min((c + 1) * CHUNK, width)):
                size = _i32(_i32(row[j]) & magnitude)
                value = size if row[j] >= 0 else _i32(-size)
                if value > bound or (value == bound and equal < num):  # one in twenty
                    equal += value == bound
                    keys[found] = (-np.int64(value) << 32) + j
                    found += 1
        _first(keys[:found], num, ids[r])
