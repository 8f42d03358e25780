"""Token selection: logits processors, noise, token trees, and the rules that verify trees.

Inputs are logits and a tree of draft tokens; outputs are the accepted path and one more token. Nothing here
depends on models, files or draft sources.
"""
