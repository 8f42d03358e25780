"""Layers that carry a state from token to token: short convolutions and linear attention, over token trees.

A state per node would take a hundred megabytes and more. So the committed state is kept, and of the rows
behind it what they add to it; a pass walks the tree with one state, and a commit adds the accepted path.
"""
