"""Stored sizes of well-known models, for `offspec plan list`, equal those that the code computes."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offspec.checkpoint.known_models import KnownSize, known_sizes, model_groups

ROOT = Path(__file__).parents[2]
GROUPS = [names[0] for names in model_groups()]
FEW = ("Qwen/Qwen3-0.6B", "deepseek-ai/DeepSeek-V4-Flash")


@pytest.fixture(scope="module")
def sizes() -> Callable[[str], dict[str, Any]]:
    """Module that writes the file."""
    spec = importlib.util.spec_from_file_location("make_sizes", ROOT / "docs" / "make_sizes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[str], dict[str, Any]] = module.sizes
    return found


def check(kept: KnownSize, found: KnownSize) -> None:
    """Minimum sizes include workspace, which depends on the processor's matrix units."""
    assert (kept.nbytes, kept.refused) == (found.nbytes, found.refused)
    assert kept.least_ram == pytest.approx(found.least_ram, rel=0.2)
    assert kept.least_vram == pytest.approx(found.least_vram, rel=0.2)


@pytest.mark.parametrize("model", FEW)
def test_sizes_follow_from_the_configuration(model: str, sizes: Callable[[str], dict[str, Any]]) -> None:
    check(known_sizes()[model], KnownSize(**sizes(model)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", [model for model in GROUPS[::5] if model not in FEW])
def test_sizes_of_more_models(model: str, sizes: Callable[[str], dict[str, Any]]) -> None:
    check(known_sizes()[model], KnownSize(**sizes(model)))


def test_every_name_has_a_size_or_a_reason() -> None:
    for name, size in known_sizes().items():
        whole = size.least_vram > 0 and 0 < size.least_ram < size.nbytes
        assert whole != bool(size.refused), name
