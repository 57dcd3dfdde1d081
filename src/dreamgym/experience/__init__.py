"""The experience model: it plays the environment by reasoning about a world sheet."""
