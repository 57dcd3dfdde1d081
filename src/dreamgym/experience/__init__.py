"""The experience model: it predicts an environment by reasoning about a world sheet."""
