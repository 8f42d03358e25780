"""Benches: each prints the ceiling first, then what was reached, then one line of JSON."""

from offspec.core.openmp import limit_spinning

limit_spinning()  # before any of them imports torch, and for the processes that they start
