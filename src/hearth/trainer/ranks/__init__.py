"""One trainer as several processes that share its weights."""
