"""Trajectories on disk: reading, writing, shipped datasets, and ingestion of other trace formats."""
