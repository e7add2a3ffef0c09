"""ESP: attention by a mixture of sliced plans between sorted clouds.

match: where clouds are sorted.  probe: which sorts, temperature and slice weights give a map.  site: what
is found, and the operator call that it becomes.
"""
