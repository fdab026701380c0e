"""The formulas as metrics for the `evaluate` library, one per file.

`evaluate.load(FILE)` takes a file's first class.
"""
