"""pytest -p tests.support.simulated_cuda.plugin --simulated-cuda=POLICY: tests marked `gpu` get a device."""

import os
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.simulated_cuda import is_simulated

# Use one thread, and kernels in Python; set before torch and triton are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("simulated CUDA")
    group.addoption(
        "--simulated-cuda",
        metavar="POLICY",
        help="eager, late, late-copies, late-compute, random:SEED; several: one for each process of -n",
    )
    group.addoption(
        "--simulated-cuda-waits",
        type=int,
        default=0,
        metavar="N",
        help="show the N lines that wait for the device most often",
    )


def pytest_configure(config: pytest.Config) -> None:
    policies = config.getoption("--simulated-cuda")
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if not policies or (worker is None and config.getoption("numprocesses", None)):
        return  # also in a process that only distributes tests

    from tests.support.simulated_cuda.install import install_machine
    from tests.support.simulated_cuda.kernels import install_kernels

    names = policies.split(",")
    install_machine(names[int((worker or "gw0").removeprefix("gw")) % len(names)], total=4 << 30)
    install_kernels()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of files without tests marked `gpu` if only such tests are selected."""
    if not config.option.markexpr.startswith("gpu and ") or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    return None if "gpu" in text or "device" in text else True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, object, object]:
    """Fail a test that leaves a copy behind which would write to memory of the next test."""
    result = yield
    if is_simulated():
        from tests.support.simulated_cuda.machine import machine

        misused = machine().misused[:]
        machine().misused.clear()
        assert not misused, f"memory was given back before a copy came to use it: {misused}"
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not is_simulated():
        return
    from tests.support.simulated_cuda.machine import machine

    of = machine()
    terminalreporter.write_line(f"simulated: {dict(of.counts)}, copied {dict(of.copied)}, {of.syncs} waits")
    for (cause, line), count in of.waits.most_common(config.getoption("--simulated-cuda-waits")):
        terminalreporter.write_line(f"{count:8d} {cause} in {line}")
