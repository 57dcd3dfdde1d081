"""Reads run directories and renders tables and one HTML page."""
