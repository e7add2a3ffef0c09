"""asapc: a post-training compiler for doubly-stochastic (Sinkhorn) attention."""
