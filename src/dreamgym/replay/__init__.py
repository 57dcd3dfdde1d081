"""Experience: offline trajectories, and the replay buffer that finds similar transitions again."""
