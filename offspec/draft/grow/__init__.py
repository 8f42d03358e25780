"""Growing a token tree: best first, or into a shape that was optimised beforehand."""
