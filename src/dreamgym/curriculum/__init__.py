"""Which tasks come next: reward entropy, the pool of tasks, and variations of those that teach most."""
