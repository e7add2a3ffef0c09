"""What people read in a terminal: escaped text, progress, the next command."""
