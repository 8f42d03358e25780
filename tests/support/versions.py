"""Marks for tests of what only newer versions of a dependency can do."""

from importlib.metadata import version

import pytest
from packaging.version import Version


def needs_transformers(least: str) -> pytest.MarkDecorator:
    """Skip where an older version of transformers is installed."""
    old = Version(version("transformers")) < Version(least)
    return pytest.mark.skipif(old, reason=f"needs transformers {least}")
