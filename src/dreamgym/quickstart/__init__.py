"""The quickstart: the whole loop with settings that fit a small machine."""
