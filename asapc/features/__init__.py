"""What a dual is predicted from, one family per file."""
