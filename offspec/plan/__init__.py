"""What fits and what is fastest: models are opened, measured and placed, and the outcome is a plan.

Settings come in; loaded models and a draft policy, or a plan alone, go out. Nothing here answers a prompt.
"""
