"""Captured graphs as they are called, run and put in place of a model's own code."""
