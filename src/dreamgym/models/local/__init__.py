"""Language models in this process: continuous batching over KV caches, with exact tokens and log-probs."""
