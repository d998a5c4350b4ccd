"""Remote code, published with the weights: flat modules that import nothing else of the package.

Start with `tssa_reference.py`.
"""
