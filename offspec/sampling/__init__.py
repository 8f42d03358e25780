"""How a token is chosen: logits processors, noise, token trees and the rules that verify them.

Logits and a tree of draft tokens come in; the accepted path and one more token go out. Nothing here knows a
model, a file or where draft tokens come from.
"""
