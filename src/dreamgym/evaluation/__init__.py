"""Measures policies and experience models against the real environment."""
