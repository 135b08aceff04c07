"""What the product documents import of ``tinker_cookbook``, for where that is not installed."""
