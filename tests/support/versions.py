"""Skip tests of features that need newer versions of a dependency."""

from importlib.metadata import version

import pytest
from packaging.version import Version


def has_transformers(least: str) -> bool:
    """Return whether transformers is at least this version."""
    return Version(version("transformers")) >= Version(least)


def needs_transformers(least: str) -> pytest.MarkDecorator:
    """Mark that skips a test with an older version of transformers."""
    return pytest.mark.skipif(not has_transformers(least), reason=f"needs transformers {least}")
