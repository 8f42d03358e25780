"""Heads trained on a target's own text, and written as they are published."""

from offspec.distill.make import Distilled, distill_head
from offspec.distill.wanted import KINDS, Kind, Wanted

__all__ = ["KINDS", "Distilled", "Kind", "Wanted", "distill_head"]
