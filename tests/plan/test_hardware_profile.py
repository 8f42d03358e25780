"""The profile of this machine: its disk, its location, and when it is measured again."""

import errno
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import offspec_planners.measure as measuring
from offspec.core.errors import CapacityError, CheckpointError, DiskFullError, PlanError, RequestError
from offspec.core.events import Event, LoadProgress, Notice
from offspec.model import cpu_contention
from offspec.plan import hardware_profile
from offspec.plan import hardware_profile as machine
from offspec_planners.hardware_rates import Hardware, Processor, Rate
from offspec_planners.measure import processor


@dataclass
class ScriptedMeasurement:
    """Replaces the measurement: counts the calls, and records the files to read."""

    times: int = 0
    files: list[Path] = field(default_factory=list)
    bytes_read: int = 0
    events: list[Event] = field(default_factory=list)
    failure: BaseException | None = None
    memory: float = 1e10

    def measure(self, files: Sequence[Path], device: str, progress: Any, product: Any) -> Hardware:
        self.times += 1
        self.files = list(files)
        self.bytes_read = sum(os.stat(file).st_size for file in files)
        progress("disk", 0, 4)
        progress("memory", 1, 4)
        if self.failure is not None:
            raise self.failure
        which = measuring.identify(device)
        memory = Rate.exactly(self.memory)
        chip = Processor(which.processor, which.memory, memory, ((1, 1e10),), 1e-4)
        return Hardware(which.name, which.ram, Rate.exactly(self.times * 1e9), None, chip)

    @property
    def notices(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Notice)]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ScriptedMeasurement:
    from huggingface_hub import constants

    bench = ScriptedMeasurement()
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(measuring, "measure", bench.measure)
    monkeypatch.setattr(hardware_profile, "_WRITTEN", 1 << 20)
    monkeypatch.setattr(hardware_profile, "_BLOCK", 1 << 18)
    monkeypatch.setattr(hardware_profile, "_LARGE", 1000)
    monkeypatch.setattr(hardware_profile, "_ENOUGH", 3000)
    return bench


def ask(bench: ScriptedMeasurement, **options: Any) -> machine.Profile:
    return machine.profile("cpu", bench.events.append, **options)


def kept(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "hardware.json"


@pytest.mark.gpu
def test_gpu_profile_times_row_linear(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Passes multiply with `row_linear` there, whose rows are independent, not with a library's product."""
    from offspec_kernels.row_linear import triton

    monkeypatch.setattr(measuring, "_SIDE", 64)
    monkeypatch.setattr(measuring, "_SECONDS", 0.001)
    monkeypatch.setattr(measuring, "copy_bandwidth", lambda device: Rate.exactly(1e9))
    monkeypatch.setattr(processor, "_READ_BYTES", {"cpu": 1 << 16, "cuda": 1 << 16})
    monkeypatch.setattr(processor, "_WEIGHT_BYTES", {"cpu": 1 << 16, "cuda": 1 << 16})
    file = tmp_path / "file"
    file.write_bytes(os.urandom(1 << 16))
    multiplied, product = set[int](), triton.row_linear

    def noted(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if tuple(weight.shape) == (64, 64):
            multiplied.add(len(rows))
        return product(rows, weight, bias)

    monkeypatch.setattr(triton, "row_linear", noted)
    found, _ = machine._measure([file], "cuda", list[Event]().append)
    assert [rows for rows, _ in found.processor.gemm] == sorted(multiplied) == [1, 4, 16, 64, 256, 1024, 4096]


def test_profile_is_measured_once_and_saved(bench: ScriptedMeasurement, tmp_path: Path) -> None:
    first = ask(bench)
    assert ask(bench) == first and bench.times == 1
    assert machine.machine_fingerprint("cpu") == first.hardware.fingerprint()
    assert LoadProgress("measuring this machine", 0, 4, "steps") in bench.events
    [entry] = json.loads(kept(tmp_path).read_text())["profiles"].values()
    assert entry["measured"] == first.measured
    assert bench.bytes_read == 1 << 20, "without large files one is written, and nothing is left of it"
    assert os.listdir(tmp_path / "cache") == ["hardware.json"]
    assert ask(bench, remeasure=True).hardware.disk.value == ask(bench).hardware.disk.value == 2e9


def test_implausible_figures_are_reported_and_not_saved(bench: ScriptedMeasurement, tmp_path: Path) -> None:
    bench.memory = 21.74e6
    assert ask(bench).hardware.processor.bandwidth.value == 21.74e6
    [notice] = bench.notices
    assert "21.74 MB/s" in notice and "not kept" in notice and "measure again" in notice
    assert not kept(tmp_path).exists()
    bench.memory = 1e10
    assert ask(bench) == ask(bench) and bench.times == 2


def test_figures_on_a_busy_machine_are_reported_and_not_saved(
    bench: ScriptedMeasurement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(bench)
    times = iter([(0, 0), (10**9, 5 * 10**8), (2 * 10**9, 10**9)])
    monkeypatch.setattr(cpu_contention, "_WINDOW", 0)
    monkeypatch.setattr(cpu_contention, "_now", lambda: next(times))
    assert ask(bench, remeasure=True).hardware.disk.value == 2e9
    [notice] = bench.notices
    assert "other processes" in notice and "not kept" in notice
    assert ask(bench).hardware.disk.value == 1e9, "what was measured before"


def test_profiles_of_two_machines_are_kept(
    bench: ScriptedMeasurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    ask(bench)
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    ask(bench)
    assert bench.times == 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert ask(bench).hardware.disk.value == 1e9
    assert bench.times == 2


@pytest.mark.parametrize(
    "text", ["", "[]", '{"version": 2}', '{"version": 1, "profiles": {"x": {"measured": "now"}}}']
)
def test_damaged_file_is_rewritten_with_a_notice(
    bench: ScriptedMeasurement, tmp_path: Path, text: str
) -> None:
    kept(tmp_path).parent.mkdir()
    kept(tmp_path).write_text(text)
    ask(bench)
    assert bench.times == 1
    assert bench.notices == [f"{kept(tmp_path)} is damaged and will be written again"]
    ask(bench)
    assert bench.times == 1


def test_interrupt_leaves_no_files(bench: ScriptedMeasurement, tmp_path: Path) -> None:
    bench.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        ask(bench)
    assert os.listdir(tmp_path / "cache") == []


def test_largest_cached_models_are_read_first(bench: ScriptedMeasurement, tmp_path: Path) -> None:
    made = {"cache/unpacked/model/a.safetensors": 2000, "hub/models--x--y/blobs/b": 1500}
    small = {"cache/unpacked/model/config.json": 5000, "hub/models--x--y/blobs/c": 999}
    for name, size in (made | small).items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(size))
    ask(bench)
    assert bench.files == [tmp_path / name for name in made]


def test_folders_are_searched_and_links_followed(bench: ScriptedMeasurement, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "one"
    folder.mkdir(parents=True)
    (tmp_path / "blob").write_bytes(bytes(4000))
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    (folder / "broken").symlink_to(tmp_path / "nowhere")
    ask(bench, folder=tmp_path / "models")
    assert bench.files == [folder / "model.safetensors"]
    ask(bench, remeasure=True, files=[tmp_path / "blob"])
    assert bench.files == [tmp_path / "blob"]
    bench.failure = OSError(errno.EIO, "Input/output error")
    with pytest.raises(CheckpointError, match="Input/output error"):
        ask(bench, remeasure=True, files=[tmp_path / "blob"])


def test_missing_folder_or_device(bench: ScriptedMeasurement, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no folder"):
        ask(bench, folder=tmp_path / "none")
    with pytest.raises(RequestError, match="no usable GPU"):
        machine.profile("cuda:99", bench.events.append)


def test_full_disk(bench: ScriptedMeasurement, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError, match="free some space"):
        ask(bench)
    monkeypatch.setattr(hardware_profile, "_WRITTEN", 1 << 60)
    monkeypatch.setattr(tempfile, "TemporaryFile", None)
    with pytest.raises(DiskFullError, match="OFFSPEC_CACHE"):
        ask(bench)
    assert bench.times == 0


def test_unwritable_cache_is_reported(bench: ScriptedMeasurement, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise DiskFullError("the disk filled up")

    monkeypatch.setattr(machine, "write_atomic", full)
    assert ask(bench).hardware.disk.value == 1e9
    assert bench.notices == ["the profile of this machine could not be saved: the disk filled up"]


def test_file_system_without_direct_reads_is_reported(
    bench: ScriptedMeasurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring.disk, "reads_past_cache", lambda path: False)
    ask(bench)
    assert "O_DIRECT" in bench.notices[0]


def test_device_without_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**10))
    with pytest.raises(CapacityError, match=r"1\.00 GB are free"):
        machine._require_room("cuda")
    machine._require_room("cpu")


def test_hardware_is_a_preset_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card, laptop = machine.load_hardware("rtx-4090"), machine.load_hardware("laptop-8gb")
    monkeypatch.chdir(tmp_path)
    assert machine.load_hardware("rtx-4090.json") == card
    file = tmp_path / "rtx-4090.json"
    file.write_text(laptop.text())
    assert machine.load_hardware("rtx-4090.json") == machine.load_hardware(str(file)) == laptop
    for name in ("rtx-9090", "rtx-9090.json"):
        with pytest.raises(RequestError, match=r"unknown hardware 'rtx-9090.*presets are.*rtx-5090"):
            machine.load_hardware(name)
    for data, why in (
        (b'{"version": 1}', "json is not a hardware profile: name is missing"),
        (b"\xff\xfe", "json"),
    ):
        file.write_bytes(data)
        with pytest.raises(PlanError, match=rf"rtx-4090\.{why}"):
            machine.load_hardware(str(file))
