"""Code shared by the benches: reports, memory limits, generated models, helper processes."""
