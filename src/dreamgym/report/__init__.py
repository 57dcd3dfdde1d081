"""Shows runs: reads what they left on disk, nothing else, and makes tables and one whole page of it."""
