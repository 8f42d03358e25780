"""Shared by the benches: reports, limits, models that are made, arithmetic and plots."""
