"""Learners: GRPO, PPO, SFT and DPO on exact tokens, and their losses as pure functions."""
