"""Recurrent layers over token trees: short convolutions and linear attention.

One state per node would take a hundred megabytes or more. So only the committed state is stored, plus the
updates of later rows. A pass traverses the tree with one state, and a commit applies the updates of the
accepted path.
"""
