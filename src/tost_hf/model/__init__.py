"""Remote code, published with the weights: flat siblings that import nothing else of the package. Start with `tssa.py`."""
