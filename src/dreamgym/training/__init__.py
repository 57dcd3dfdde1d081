"""Puts the stages together: measuring an experience model, and training inside it."""
