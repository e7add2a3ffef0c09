"""Triton twins of the operators: imported only when one of them is to run."""
