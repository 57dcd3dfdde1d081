"""The quickstart: presets for the whole loop on a small machine."""
