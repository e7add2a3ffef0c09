"""Fast twins of the operators, one file per operator, same signature."""
