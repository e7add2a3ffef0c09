"""LOT: attention by two plans against pivots, glued.

match: chained products with a plan each.  probe: which loop, pivots and masses give a plan.  site: what
is found, and the operator call that it becomes.
"""
