"""Planning: models are opened, measured and placed in memory, and the fastest settings become a plan.

The input is settings; the output is loaded models with a draft policy, or a plan alone. Nothing here answers
a prompt.
"""
