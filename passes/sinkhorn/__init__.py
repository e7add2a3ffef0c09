"""Sinkhorn: attention by a finite loop of half-steps on scores.

match: which regions are one, by experiment.  probe: which loop maps scores to attention.  site: what is
found, and the operator call that it becomes.
"""
