"""What a model needs in memory, and how many GPUs to give to whom. Arithmetic alone: no torch."""
