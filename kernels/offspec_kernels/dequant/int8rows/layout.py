"""The step of a code."""

STEP = 7.874015718698502e-3  # the float32 nearest to 1 / 127
