"""Heads trained on a target's own text, and written as they are published."""

from offspec.distill.config import KINDS, Kind, Wanted
from offspec.distill.make import Distilled, distill_head

__all__ = ["KINDS", "Distilled", "Kind", "Wanted", "distill_head"]
