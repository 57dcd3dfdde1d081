"""Rollout groups on workers: processes of this machine, or actors of a Ray cluster."""
