"""Rollout groups on worker processes of this machine."""
