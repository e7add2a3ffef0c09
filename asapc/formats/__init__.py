"""Files as such: written whole or not at all, read within bounds; JSON, YAML, paths, names and sizes."""
