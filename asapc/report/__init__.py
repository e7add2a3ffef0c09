"""Renderings of the report: Markdown, JSON and terminal tables."""
