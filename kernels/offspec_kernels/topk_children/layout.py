"""How a row is cut, for every path alike."""

BLOCK = 128  # columns that are searched by their maximum first
