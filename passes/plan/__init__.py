"""Plan: a finite Sinkhorn loop wherever it stands, from given scores or costs to its plan or log plan.

loops: where a graph normalises rows and columns in turn.  match: from where to where one goes, by
experiment.  probe: which loop it is.  site: what is found, and the operator call that it becomes.
"""
