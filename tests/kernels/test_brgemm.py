"""Private functions of torch behind the products of blocks: without them all is right, and slower."""

import platform
from collections.abc import Iterator

import pytest
import torch

from offspec_kernels.row_linear import brgemm


@pytest.fixture
def afresh() -> Iterator[None]:
    brgemm.find_brgemm.cache_clear()
    yield
    brgemm.find_brgemm.cache_clear()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only processors of this kind use them")
def test_this_torch_has_the_private_functions() -> None:
    """Fails with a torch that has renamed them: nothing else would tell, as slower products take over."""
    assert not brgemm.missing_symbols(), f"torch {torch.__version__}"
    assert brgemm.find_brgemm() is not None or not brgemm.processor_multiplies()


@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize(
    ("attribute", "value", "named"),
    [
        ("_BRGEMM", "_ZN2at6brgemmEv", "_ZN2at6brgemmEv"),
        ("_SUPPORTED", ("_is_amx", "_is_avx512_bf16_supported"), "torch.cpu._is_amx"),
    ],
)
def test_a_torch_without_one_of_them_is_not_used(
    monkeypatch: pytest.MonkeyPatch, attribute: str, value: object, named: str
) -> None:
    monkeypatch.setattr(brgemm, attribute, value)
    assert brgemm.missing_symbols() == [named] and brgemm.find_brgemm() is None
