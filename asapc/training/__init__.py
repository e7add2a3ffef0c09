"""Training after replacement: refreshing a compiled model, annealing towards it."""
