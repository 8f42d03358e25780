"""Fixtures of tests of drafters."""

from tests.draft.eagle_heads import parts

__all__ = ["parts"]
