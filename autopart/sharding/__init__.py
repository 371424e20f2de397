"""Tensor splits: layouts of every value on t ranks, one rule for each operator family, and the rewritten local graph."""
