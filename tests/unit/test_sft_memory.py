"""What a training step holds: no [T, T] matrix in attention, no [rows, V] matrix in the loss; where hidden states lie.

Peaks are of tensors alive at once, as torch's own allocator reports every allocation (torch.profiler).
"""

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from bebop.backbone import hidden_states as hidden_module
from bebop.backbone import load_backbone
from bebop.backbone.hidden_states import HiddenStates
from bebop.config import Loss
from bebop.data.batches import pack_rows, train_batch
from bebop.data.self_distill import TextRow
from bebop.head_training.objective import HeadObjective
from bebop.mtp import chain_attention as attention
from bebop.mtp import load_heads
from bebop.mtp.chain_attention import Documents, chain_attention, dense_causal, dense_causal_backward


def _peak_bytes(run) -> int:
    """Most bytes that `run` held at once, beyond what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    alive = peak = 0
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def test_the_measure_sees_a_matrix():
    def run():
        torch.zeros(1000, 1000)
        torch.zeros(500, 1000)

    assert _peak_bytes(run) == 4_000_000


def _attention(length):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(length, 2, 16, generator=generator, requires_grad=True) for _ in range(3))
    chain = torch.randn(length, 2, 2, 16, generator=generator, requires_grad=True)
    documents = Documents.of(torch.tensor([0, length]))

    def run():
        chain_attention(q, k, v, chain, chain, documents).sum().backward()

    return run


def test_packed_attention_memory_grows_linearly_with_length():
    """A [T, T] mask or score matrix of 8192 tokens would be 64 MiB as bytes and 256 MiB as float32, a head."""
    short, long = _peak_bytes(_attention(2048)), _peak_bytes(_attention(8192))
    assert long < 5 * short
    assert long < 64 * 2**20


def test_attention_without_a_flash_kernel_runs_in_blocks():
    def run(length):
        q, k, v, grad = (torch.randn(1, 1, length, 8) for _ in range(4))

        def both():
            out, lse = dense_causal(q, k, v)
            dense_causal_backward(grad, q, k, v, out, lse)

        return both

    short, long = _peak_bytes(run(1024)), _peak_bytes(run(4096))
    assert long < 5 * short, f"{short} bytes at 1024 tokens, {long} at 4096"


def test_blocks_leave_attention_and_its_gradients_as_they_are(monkeypatch):
    """13 queries in blocks of 5, against torch's own attention and autograd."""
    monkeypatch.setattr(attention, "BLOCK", 5)
    q, k, v = (torch.randn(2, 3, 13, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    grad = torch.randn(2, 3, 13, 4, dtype=torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    with torch.no_grad():
        out, lse = dense_causal(q, k, v)
        found = dense_causal_backward(grad, q, k, v, out, lse)
    torch.testing.assert_close(out, expected)
    for one, other in zip(found, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        torch.testing.assert_close(one, other)


def _step(vocab_size, head, rows, width):
    generator = torch.Generator().manual_seed(0)
    frozen = [torch.randn(vocab_size, width, generator=generator) / 4 for _ in range(2)]
    objective = HeadObjective(head, *frozen, 3, Loss())
    (indexed,) = pack_rows(rows, range(len(rows)), 100_000, 3)
    batch = train_batch(indexed, torch.randn(indexed.packed.input_ids.numel(), width, generator=generator))
    return lambda: objective(batch)[0].backward()


def test_larger_vocabulary_adds_no_logit_matrix_to_a_step(tiny_random):
    """V = 4096 and 32768, 2,046 anchors, depth 3: whole draft logits would take 96 and 767 MiB."""
    head = load_heads(tiny_random)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4096, (2, 1026), generator=generator).tolist()
    rows = [TextRow(str(i), "r", tuple(x[:1]), tuple(x[1:]), (1,) * (len(x) - 1)) for i, x in enumerate(ids)]
    peaks = [_peak_bytes(_step(size, head, rows, head.config.hidden_size)) for size in (4096, 32768)]
    anchors = 3 * 2 * (1026 - 4)
    assert peaks[1] - peaks[0] < 0.25 * 4 * anchors * (32768 - 4096), [f"{peak / 2**20:.0f} MiB" for peak in peaks]


@pytest.fixture(scope="module")
def backbone(tiny_random):
    return load_backbone(tiny_random, dtype=torch.float32)


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(3)
    lengths = (9, 14, 6, 11)
    drawn = [torch.randint(5, 90, (n,), generator=generator).tolist() for n in lengths]
    return [TextRow(str(i), "r", tuple(x[:2]), tuple(x[2:]), (1,) * (len(x) - 2)) for i, x in enumerate(drawn)]


def _all(states, rows):
    return torch.cat([states.batch(b).hidden for b in pack_rows(rows, [2, 0, 3, 1], 24, 3)])


def test_memory_disk_and_stream_hand_out_the_same_states(backbone, rows, tmp_path):
    file = tmp_path / "hidden.bin"
    found = [
        _all(HiddenStates(backbone, rows, 24, name="text", how=how, file=file, identity="p"), rows)
        for how in ("memory", "disk", "stream")
    ]
    assert torch.equal(found[0], found[1])
    assert torch.allclose(found[0], found[2], atol=1e-5)


def test_states_on_disk_are_reused_only_if_valid(backbone, rows, tmp_path):
    file, name = tmp_path / "hidden.bin", {"name": "text", "how": "disk", "file": tmp_path / "hidden.bin"}
    first = _all(HiddenStates(backbone, rows, 24, identity="p", **name), rows)
    written = file.stat().st_mtime_ns
    assert torch.equal(_all(HiddenStates(backbone, rows, 24, identity="p", **name), rows), first)
    assert file.stat().st_mtime_ns == written
    HiddenStates(backbone, rows, 24, identity="another", **name)
    assert file.stat().st_mtime_ns > written
    file.write_bytes(file.read_bytes()[:100])  # cut off
    assert torch.equal(_all(HiddenStates(backbone, rows, 24, identity="another", **name), rows), first)
    file.unlink()  # the large one removed for its room
    assert torch.equal(_all(HiddenStates(backbone, rows, 24, identity="another", **name), rows), first)
    file.with_suffix(".json").unlink()  # killed between the two
    file.write_bytes(b"\0" * file.stat().st_size)
    file.with_name(f".{file.name}.0badcafe.part").write_bytes(b"begun")
    assert torch.equal(_all(HiddenStates(backbone, rows, 24, identity="another", **name), rows), first)
    assert json.loads(file.with_suffix(".json").read_text())["shape"] == [40, 64]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hidden.bin", "hidden.json", "hidden.lock"]


def test_too_large_states_are_refused_before_the_backbone_runs(backbone, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(backbone, "hidden", None)
    monkeypatch.setattr(hidden_module, "_free_memory", lambda: 1000)
    with pytest.raises(ValueError, match=r"data.cache_hidden=memory: .* set data.cache_hidden=disk or stream"):
        HiddenStates(backbone, rows, 24, name="text")
    usage = hidden_module.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(hidden_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match=r"data.cache_hidden=disk: .* set data.cache_hidden=stream"):
        HiddenStates(backbone, rows, 24, name="text", how="disk", file=tmp_path / "hidden.bin")
