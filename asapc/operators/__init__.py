"""What each operator means: its reference in plain PyTorch, and its description (see .catalogue)."""
