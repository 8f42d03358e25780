"""Two devices: each has memory, streams and tensors of its own, and a thread selects one."""

import threading
from typing import Any

import pytest
import torch

from offspec_kernels.row_linear import row_linear

pytestmark = pytest.mark.gpu


def test_tensors_of_two_devices_cannot_be_combined(late: Any) -> None:
    here, there = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
    assert (there + there).device == torch.device("cuda", 1)
    for other, places in ((here, "cuda:0 and cuda:1"), (torch.ones(3), "cpu and cuda:1")):
        with pytest.raises(RuntimeError, match=places):
            other + there
    rows, weight = torch.ones(2, 8, device="cuda:1"), torch.ones(3, 8, device="cuda:1")
    assert row_linear(rows, weight).tolist() == [[8.0] * 3] * 2, "a kernel runs where its tensors are"


def test_copy_between_devices_is_ordered_on_both(late: Any) -> None:
    given = torch.zeros(4, device="cuda:0")
    given += 5
    moved = given.to("cuda:1") * 2
    given += 100
    assert moved.tolist() == [10, 10, 10, 10] and late.copied["device to device"] == 16


def test_each_device_has_its_own_memory_and_streams(late: Any) -> None:
    before = torch.cuda.memory_allocated(0)
    kept = torch.empty(3 << 20, dtype=torch.uint8, device="cuda:1")
    assert torch.cuda.memory_allocated(0) == before and torch.cuda.memory_allocated(1) >= kept.nbytes
    free, total = torch.cuda.mem_get_info(1)
    assert total - free == torch.cuda.memory_reserved(1)
    aside = torch.cuda.Stream(1)
    with torch.cuda.stream(aside):
        assert torch.cuda.current_device() == 1 and torch.cuda.current_stream() == aside
    assert torch.cuda.current_device() == 0
    assert torch.cuda.current_stream(1) == torch.cuda.default_stream(1)
    torch.cuda.set_device(1)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_device()))
    thread.start()
    thread.join()
    assert torch.cuda.current_device() == 1 and seen == [0], "a thread begins on the first"
    assert torch.empty(1, device="cuda").device.index == 1


def test_refused_call_fails_the_next_torch_kernel_once(late: Any) -> None:
    host, given = torch.zeros(1 << 12), torch.ones(2, device="cuda")
    runtime = torch.cuda.cudart()
    assert runtime.cudaHostUnregister(host.data_ptr()) != 0
    there = host[:2].to("cuda")  # a copy does not check
    with pytest.raises(RuntimeError, match="713"):
        given.add_(1)
    assert (given + there).tolist() == [2, 2], "it was launched all the same"
