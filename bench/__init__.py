"""Benchmarks. Each prints the ceiling first, then the result, then one line of JSON."""

from offspec.core.openmp import limit_spinning

limit_spinning()  # before torch is imported, and for all child processes
