"""The CPU as one of verl's platforms: a logical Ray "GPU" for each process, gloo, weights through shared memory.

verl 0.9.1 has platforms for CUDA, ROCm and NPU only, and finds `VERL_PLATFORM` in its `PlatformRegistry`. verl passes
`get_device_id()` to `tensor.to(...)`, so it is "cpu" here and not a number. A worker looks for its device among Ray's
accelerators, so it gets a logical "GPU". `VERL_ENGINE_DEVICE=cuda` is needed too: verl registers its FSDP engine, which
runs on any device, under the names of accelerators.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

NAME = "cpu"
DEVICES_ENV = "BEBOP_LOGICAL_DEVICES"  # verl writes a worker's device numbers here; nothing reads them on a CPU


def _device_module() -> types.ModuleType:
    """What verl calls on `torch.<device>`; on a CPU almost all of it does nothing."""
    module = types.ModuleType("bebop.rl.verl.cpu_platform.device")
    nothing: Any = lambda *_, **__: None  # noqa: E731
    for name in ("empty_cache", "ipc_collect", "set_device", "synchronize", "set_per_process_memory_fraction"):
        setattr(module, name, nothing)
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
        setattr(module, name, lambda *_: 0)
    module.mem_get_info = lambda *_: (0, 0)
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: "cpu"
    module.get_device_name = lambda *_: "cpu"
    module.current_stream = torch.cpu.current_stream
    module.stream = torch.cpu.stream
    module.get_rng_state = lambda *_: torch.get_rng_state()
    module.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    return module


@PlatformRegistry.register(platform=NAME)
class PlatformCPU(PlatformBase):
    """See the module's docstring."""

    _device = _device_module()

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> types.ModuleType:
        return self._device

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # never detected, only chosen by VERL_PLATFORM=cpu

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return None

    def synchronize(self, device_index: int | None = None) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return DEVICES_ENV

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        return None

    def profiler_stop(self) -> None:
        return None

    def cudart(self) -> None:
        return None
