"""Compiler passes over a captured graph: capture, match, select, rewrite, verify."""
