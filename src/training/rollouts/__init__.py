"""From a row to its samples: calls of the rollout function, queue, staleness gate."""
