"""Drafting while the target loads, off and on in turns."""
