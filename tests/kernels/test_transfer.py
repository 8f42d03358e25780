"""Several small arrays by one copy arrive as they were, on the host and on a device."""

import numpy as np
import pytest
import torch

from offspec_kernels.transfer import download, upload
from offspec_kernels.tree_mask import pack_rows

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_arrays_of_every_kind_arrive(device: str) -> None:
    given = [
        np.arange(5, dtype=np.int64) << 40,
        np.array([[1, -2, 3]], np.int32),
        np.empty((0, 3), np.int64),
        np.array([True, False]),
        np.arange(12, dtype=np.float32).reshape(3, 4).T,
    ]
    *there, listed, nothing = upload([*given, [7, 8], ()], torch.device(device))
    for array, tensor in zip(given, there, strict=True):
        assert tensor.device.type == device and tensor.shape == array.shape
        assert np.array_equal(tensor.cpu().numpy(), array)
    assert listed.tolist() == [7, 8] and listed.dtype == torch.int64
    assert nothing.shape == (0,)


@pytest.mark.gpu
def test_parts_lie_where_kernels_are_compiled_for_and_the_arrays_may_change() -> None:
    odd, even = np.ones(3, np.int32), np.arange(4)
    parts = upload([odd, even], torch.device("cuda"))
    odd[:], even[:] = 0, 0
    assert all(part.data_ptr() % 16 == 0 for part in parts)
    assert parts[0].tolist() == [1, 1, 1] and parts[1].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("device", DEVICES)
def test_results_come_back(device: str) -> None:
    wide = torch.tensor([[2**40, -1]], device=device)
    narrow = torch.tensor([0.5, -torch.inf, torch.nan], device=device)
    found = download(wide, narrow)
    assert found[0].tolist() == [[2**40, -1]] and found[0].dtype == np.int64
    assert np.array_equal(found[1], np.array([0.5, -np.inf, np.nan], np.float32), equal_nan=True)


def test_rows_are_packed_bit_by_bit() -> None:
    random = np.random.default_rng(3)
    for columns in (0, 1, 7, 63, 64, 65, 130):
        sees = random.random((5, columns)) < 0.5
        packed = pack_rows(sees)
        assert packed.shape == (5, max(1, -(-columns // 64)))
        for row, words in zip(sees, packed, strict=True):
            bits = [int(words[place // 64]) >> place % 64 & 1 for place in range(64 * len(words))]
            assert bits[:columns] == row.astype(int).tolist() and not any(bits[columns:])
