"""What vLLM 0.31 needs before it serves the families: rotary embedding on a CPU, Qwen3.5 without torchvision."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from bebop.engines.vllm_engine import fixes


@pytest.mark.skipif(not fixes.on_cpu(), reason="the operator at fault is the CPU's")
@pytest.mark.parametrize("shape", [(5, 4), (1, 4), (5, 1)], ids=["heads", "one token", "one head"])
def test_queries_with_a_head_dimension_turn_like_flat_ones(shape):
    """DeepSeek's: a part of each head's columns, pairs side by side."""
    status = fixes.apply_all()
    assert status["head_rotary"] == "applied"
    ops = importlib.import_module("vllm._custom_ops")
    positions, width = torch.arange(shape[0]) + 3, 16
    angles = torch.arange(16)[:, None] / 100 ** (torch.arange(0, width, 2) / width)
    table, angle = torch.cat([angles.cos(), angles.sin()], -1), angles[positions]

    def turned(x):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(-2)

    query = torch.randn(*shape, 20)[..., 4:]
    key = torch.randn(shape[0], 20)[:, None, 4:]
    expected = turned(query), turned(key)
    ops.rotary_embedding(positions, query, key, width, table, False)
    torch.testing.assert_close((query, key), expected)


def test_qwen3_5_is_imported_without_torchvision():
    if importlib.util.find_spec("torchvision") is None:
        assert fixes.apply_all()["text_only"] == "applied"
    module = importlib.import_module("vllm.model_executor.models.qwen3_5_mtp")
    assert module.Qwen3_5MTP is not None and "torchvision" not in sys.modules
