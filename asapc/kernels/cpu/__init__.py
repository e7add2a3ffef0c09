"""CPU twins of the operators."""
