"""What was sampled: rollouts, groups, advantages, datums; the one alignment."""
