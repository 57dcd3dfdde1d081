"""Learning from rollouts: objectives as pure functions, and the learners that apply them to exact tokens."""
