"""How far two results are from each other, how sure that is, and how long they took."""
