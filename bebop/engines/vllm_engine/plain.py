"""Keeps weights on a CPU as they were loaded, so that updates reach them.

vLLM 0.31.0 packs weights for its CPU kernels after the first load, in place or without keeping the plain ones, and an
update cannot undo that. A linear layer fails (`loaded weight (64,128) into parameter (0)`). Experts and the convolution
of a gated delta net silently treat the plain numbers as packed ones.

| layer               | here                                                                                   |
|---------------------|----------------------------------------------------------------------------------------|
| linear              | multiplies by the plain weight                                                         |
| experts             | parameters stay plain; a packed copy is made again after each update                   |
| convolution         | the packed weight's loader packs the new weight                                        |
| DeepSeek's kv_b_proj| kept if AMX packs it (that path has not been run: the developers' CPUs have no AMX)    |

The copies double the experts' memory. vLLM is imported only inside functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def apply(replace: Callable[[Any, str, Callable], None]) -> None:
    """Apply all of this. replace: the function of `bebop.engines.vllm_engine.fixes` that replaces an attribute once."""
    _keep_linears(replace)
    _keep_experts(replace)
    _keep_latent(replace)


def _keep_linears(replace: Callable[[Any, str, Callable], None]) -> None:
    from vllm.model_executor.layers import utils

    stock = utils.dispatch_cpu_unquantized_gemm

    @functools.wraps(stock)
    def keep_weight(layer: nn.Module, remove_weight: bool) -> None:
        if layer.weight.is_meta:
            stock(layer, remove_weight)
        elif layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        elif not hasattr(layer, "_cpu_unpacked_conv_weight"):  # else it was packed before, and its loader packs
            shape = layer.weight.shape
            stock(layer, remove_weight)
            if hasattr(layer, "_cpu_unpacked_conv_weight"):
                layer.weight.weight_loader = _packing_loader(layer, shape)

    replace(utils, "dispatch_cpu_unquantized_gemm", keep_weight)


def _packing_loader(layer: nn.Module, shape: torch.Size) -> Callable[[nn.Parameter, Tensor], None]:
    from vllm import _custom_ops

    load, plain = layer.weight.weight_loader, layer._cpu_unpacked_conv_weight

    def loader(parameter: nn.Parameter, loaded: Tensor) -> None:
        load(nn.Parameter(plain.view(shape), requires_grad=False), loaded)  # shares memory with the plain copy
        parameter.data.copy_(_custom_ops.causal_conv1d_weight_pack(plain))

    return loader


def _keep_experts(replace: Callable[[Any, str, Callable], None]) -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    pack, multiply = CPUUnquantizedExperts.process_weights_after_loading, CPUUnquantizedExperts.apply
    set_up = UnquantizedFusedMoEMethod._setup_kernel

    @functools.wraps(pack)
    def pack_copies(self: Any, layer: nn.Module) -> None:
        plain = layer.w13_weight, layer.w2_weight
        pack(self, layer)
        self.bebop_packed = layer.w13_weight.data, layer.w2_weight.data
        layer.w13_weight, layer.w2_weight = plain

    @functools.wraps(multiply)
    def by_copies(self: Any, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, *args: Any, **kwargs: Any):
        multiply(self, output, hidden_states, *self.bebop_packed, *args, **kwargs)

    @functools.wraps(set_up)
    def set_up_again(self: Any, layer: nn.Module, w13: Tensor, w2: Tensor) -> None:
        updated = self.moe_kernel is not None
        set_up(self, layer, w13, w2)
        if updated:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    replace(CPUUnquantizedExperts, "process_weights_after_loading", pack_copies)
    replace(CPUUnquantizedExperts, "apply", by_copies)
    replace(UnquantizedFusedMoEMethod, "_setup_kernel", set_up_again)


def _keep_latent(replace: Callable[[Any, str, Callable], None]) -> None:
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    stock = MLAAttention.process_weights_after_loading

    @functools.wraps(stock)
    def keep_weight(self: Any, act_dtype: torch.dtype) -> None:
        weight = self.kv_b_proj.weight
        stock(self, act_dtype)
        self.kv_b_proj.weight = weight

    replace(MLAAttention, "process_weights_after_loading", keep_weight)
