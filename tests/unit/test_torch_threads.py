"""One thread for small operations: for the caller alone, and for as long as it asks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bebop.engines.torch_engine.profiling import FEW_ELEMENTS, threads_for

CPU = torch.device("cpu")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_small_operations_run_on_one_thread():
    with threads_for(FEW_ELEMENTS, CPU):
        assert torch.get_num_threads() == 1
        with ThreadPoolExecutor(1) as other:  # one that starts meanwhile
            assert other.submit(torch.get_num_threads).result() == 2
    assert torch.get_num_threads() == 2
    for elements, device in ((FEW_ELEMENTS + 1, CPU), (1, torch.device("cuda"))):
        with threads_for(elements, device):
            assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_the_number_comes_back_after_an_error():
    with pytest.raises(RuntimeError), threads_for(1, CPU):
        raise RuntimeError
    assert torch.get_num_threads() == 2
