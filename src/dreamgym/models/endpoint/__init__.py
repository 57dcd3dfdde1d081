"""Language models behind an OpenAI-compatible HTTP endpoint."""
