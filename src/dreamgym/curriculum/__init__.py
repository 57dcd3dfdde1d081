"""Which tasks come next: reward entropy, the task pool, and variations of its most useful tasks."""
