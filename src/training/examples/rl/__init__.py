"""Examples of ``async_rl_loop``: each folder is a rollout function and the run that uses it."""
