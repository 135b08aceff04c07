"""Dataset rows, and the seeds of what is sampled for them."""
