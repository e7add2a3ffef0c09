"""The meaning of each operator in plain PyTorch."""
