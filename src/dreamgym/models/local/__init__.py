"""Language models that run in this process: a scheduler with continuous batching over shared KV caches."""
