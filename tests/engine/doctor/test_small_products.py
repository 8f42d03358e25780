"""oneDNN's small product: used, not used, and gone from torch."""

import platform

import pytest
import torch

from offspec.engine.doctor import small_products
from offspec.engine.doctor.finding import DoctorOptions, Finding
from offspec_kernels.row_linear import brgemm


@pytest.fixture(autouse=True)
def on_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(brgemm, "missing_symbols", lambda: [])
    monkeypatch.setattr(brgemm, "processor_multiplies", lambda: True)
    monkeypatch.setattr(brgemm, "find_brgemm", lambda: brgemm.Addresses(1, 2))


def found() -> Finding:
    [finding] = small_products.check(DoctorOptions())
    return finding


def test_the_product_is_there() -> None:
    assert found().state == "ok" and torch.__version__ in found().found


def test_a_torch_that_lost_it_is_named_with_what_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brgemm, "missing_symbols", lambda: ["_ZN2at6brgemmEv"])
    finding = found()
    assert finding.state == "limited" and "torch" in finding.remedy
    for part in (torch.__version__, "_ZN2at6brgemmEv", "slower", "quantized"):
        assert part in finding.found
    assert finding.figures == {"torch": torch.__version__, "missing": "_ZN2at6brgemmEv"}


def test_a_onednn_that_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brgemm, "find_brgemm", lambda: None)
    assert found().state == "limited" and "ONEDNN_MAX_CPU_ISA" in found().remedy


@pytest.mark.parametrize("where", ["processor", "machine"])
def test_other_processors_do_not_use_it(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    if where == "machine":
        monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(brgemm, "processor_multiplies", lambda: False)
    assert found().state == "absent" and not found().remedy
