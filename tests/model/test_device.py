"""Which device a name stands for, on machines with and without CUDA devices."""

import pytest
import torch

from offspec.core.errors import RequestError
from offspec.model import device as devices
from offspec.model.device import find_device, find_devices, resolve


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "choose_backend", lambda device: None)  # no kernel can run on either


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("name,index", [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_cuda_device_has_an_index(name: str, index: int) -> None:
    """torch refuses to make a device without one the current one, or to limit its memory."""
    assert find_device(name) == torch.device("cuda", index)


@pytest.mark.usefixtures("two_devices")
def test_a_device_beyond_the_last_is_told() -> None:
    with pytest.raises(RequestError, match="no cuda:2; this machine has 2 CUDA devices"):
        find_device("cuda:2")


@pytest.mark.usefixtures("two_devices")
def test_several_devices() -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert find_devices("cuda") == find_devices("cuda:0") == (first,)
    assert (
        find_devices("all") == find_devices("cuda:0,cuda:1") == find_devices("cuda,cuda:1") == (first, second)
    )
    assert find_devices("cuda:1,cuda:0") == (second, first), "the draft and the head are the first one's"
    assert (resolve("all"), resolve("cuda")) == ("cuda:0,cuda:1", "cuda")
    for names, told in (("cuda,cuda:0", "twice"), ("cuda,cpu", "--cpu-layers"), ("cuda,cuda:2", "no cuda:2")):
        with pytest.raises(RequestError, match=told):
            find_devices(names)


@pytest.mark.parametrize(
    "name,told", [("cuda", "--device cpu"), ("mps", "not on 'mps'"), ("gpu", "no device 'gpu'")]
)
def test_other_names_are_told(name: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RequestError, match=told):
        find_device(name)
    assert find_device("cpu") == torch.device("cpu")
