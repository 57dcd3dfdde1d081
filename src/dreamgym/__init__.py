"""DreamGym: train LLM agents inside a reasoning experience model instead of the real environment."""
