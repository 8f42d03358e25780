"""Device names, on machines with and without CUDA devices."""

import pytest
import torch

from offspec.core.errors import RequestError
from offspec.model import devices
from offspec.model.devices import find_device, find_devices, resolve_devices
from offspec_kernels import backend, triton_check
from offspec_planners.measure import gpu
from offspec_planners.measure.gpu import Fault


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "choose_backend", lambda device: None)  # no kernel can run on either


@pytest.mark.usefixtures("two_devices")
def test_names_of_devices() -> None:
    """A CUDA device has an index: torch cannot limit the memory of one without."""
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert find_device("cuda") == find_device("cuda:0") == first and find_device("cuda:1") == second
    assert find_devices("cuda") == find_devices("cuda:0") == (first,)
    for both in ("all", "cuda:0,cuda:1", "cuda,cuda:1"):
        assert find_devices(both) == (first, second)
    assert find_devices("cuda:1,cuda:0") == (second, first), "the draft and the head are on the first device"
    assert (resolve_devices("all"), resolve_devices("cuda")) == ("cuda:0,cuda:1", "cuda:0")
    with pytest.raises(RequestError, match="no cuda:2; this machine has 2 CUDA devices"):
        find_device("cuda:2")
    for names, message in (
        ("cuda,cuda:0", "twice"),
        ("cuda,cpu", "`cpu_layers`"),
        ("cuda,cuda:2", "no cuda:2"),
    ):
        with pytest.raises(RequestError, match=message):
            find_devices(names)


def test_unknown_device_names_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, message in (("cuda", '`device="cpu"`'), ("mps", "not on 'mps'"), ("gpu", "no device 'gpu'")):
        with pytest.raises(RequestError, match=message):
            find_device(name)
    assert find_device("cpu") == torch.device("cpu")


def test_the_reason_for_a_missing_cuda_device_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "usable_gpu", lambda: Fault("torch is a build for the CPU", "install another"))
    with pytest.raises(RequestError, match=r"usable GPU \(torch is a build for the CPU; install another\)"):
        find_device("cuda")


def test_auto_is_a_usable_gpu_or_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_devices("auto") == "cpu"
    monkeypatch.setattr(gpu, "usable_gpu", lambda: gpu.Gpu(1, "NVIDIA L4", 24 * 10**9, (8, 9), 58))
    assert resolve_devices("auto") == "cuda:1"


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the settings of torch's allocator."""
    settings_given = list[str]()
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings_given.append)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    return settings_given


@pytest.mark.usefixtures("two_devices")
def test_segments_of_a_cuda_device_are_expandable(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_device("cpu")
    assert settings == []
    find_device("cuda:1")
    assert settings == ["expandable_segments:True"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    find_device("cuda")
    assert settings[1:] == ["max_split_size_mb:64,expandable_segments:True"], "the user's own are kept"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    find_device("cuda")
    assert len(settings) == 2, "the user has set another value"


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that Triton supports, on a machine without a C compiler."""

    def fail(device: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC\nand more")

    monkeypatch.delenv("OFFSPEC_KERNELS", raising=False)
    monkeypatch.setattr(backend, "_refusals", {})
    monkeypatch.setattr(triton_check, "try_triton", fail)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_a_device_uses_torch_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    assert backend.choose_backend(device) == "eager"
    reason = devices.missing_kernels(device)
    assert reason is not None and "C compiler" in reason and "\n" not in reason
    monkeypatch.setenv("OFFSPEC_KERNELS", "triton")
    assert backend.choose_backend(device) == "triton" and devices.missing_kernels(device) is None
    assert devices.missing_kernels(torch.device("cpu")) is None


@pytest.mark.usefixtures("no_compiler")
def test_a_device_that_refused_a_kernel_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_check, "try_triton", lambda device: None)
    device = torch.device("cuda", 0)
    assert backend.choose_backend(device) == "triton" and devices.missing_kernels(device) is None
    backend.disable_triton(device, "a kernel could not be compiled")
    assert backend.choose_backend(device) == "eager"
    assert "a kernel could not be compiled" in (devices.missing_kernels(device) or "")
