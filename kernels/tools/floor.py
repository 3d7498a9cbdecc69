"""python kernels/tools/floor.py: count bytes and FLOP of linear_tv_overlap, and compare with the least a GPU needs.

Forward and backward with a frozen head, bf16; M = N + K target rows.

Bytes per draft element, then per target element:

ours          16: product 2, sums 2, overlap 2 + 2, gradient 2 + 2 + 2, product 2.  4, once: product 2, sums 2.
two-pass      18: the same, with the target rows summed again for each depth.  2: product.
materialised  64: product 2, to fp32 6, softmax 8, minimum 12, sum 4, their backward 24, to bf16 6, product 2.
              16: product 2, to fp32 6, softmax 8.

ours: logits of one chunk at a time. two-pass: a fused kernel that takes all logits; they and their gradient exist from
the product on. materialised: torch operations in fp32, with every intermediate result written and read.
"""

from __future__ import annotations

from dataclasses import dataclass

BANDWIDTH = 4.3e12  # bytes/s, H200
PRODUCTS = 790e12  # FLOP/s, H200, bf16 dense
SIZE = 2  # bytes of bf16
CHUNK_BYTES = 512 << 20  # of each of the two buffers of "ours"
# method -> bytes per draft element, per target element
MOVED = {"ours": (16, 4), "two-pass": (18, 2), "materialised": (64, 16)}


@dataclass(frozen=True)
class Count:
    """moved and peak in bytes. floor_ms: the products, or one read of weight and hidden states if that takes longer.
    time_ms: products and traffic one after the other."""

    flop: int
    moved: int
    peak: int
    floor_ms: float
    time_ms: float


def count(method: str, rows: int, vocab_size: int, width: int, depth: int) -> Count:
    """Cost of a method (a key of MOVED) at N = rows anchors, K = depth. Raises KeyError for an unknown method."""
    per_draft, per_target = MOVED[method]
    target_rows = rows + depth
    flop = 2 * vocab_size * width * (2 * depth * rows + target_rows)
    draft, target = depth * rows * vocab_size, target_rows * vocab_size
    inputs = SIZE * width * (vocab_size + 2 * depth * rows + target_rows)
    moved = per_draft * draft + per_target * target + inputs
    peak = {
        "ours": 2 * CHUNK_BYTES,
        "two-pass": SIZE * (draft + target),  # the gradient overwrites the draft logits
        "materialised": SIZE * (draft + target) + 4 * (2 * draft + target),  # logits, q and p, the gradient of q
    }[method]
    products = flop / PRODUCTS
    floor = max(products, inputs / BANDWIDTH)
    return Count(flop, moved, peak, floor * 1e3, (products + moved / BANDWIDTH) * 1e3)


def table(rows: int = 8192, vocab_size: int = 248320, width: int = 2048, depths: tuple[int, ...] = (1, 3, 5)) -> str:
    """Markdown: one line per method and depth."""
    lines = [
        "| K | method | TFLOP | GB moved | peak GB | floor, ms | counted, ms | counted / floor |",
        "|" + "---|" * 8,
    ]
    for depth in depths:
        for method in MOVED:
            cost = count(method, rows, vocab_size, width, depth)
            lines.append(
                f"| {depth} | {method} | {cost.flop / 1e12:.1f} | {cost.moved / 1e9:.0f} | {cost.peak / 1e9:.1f} "
                f"| {cost.floor_ms:.0f} | {cost.time_ms:.0f} | {cost.time_ms / cost.floor_ms:.2f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
