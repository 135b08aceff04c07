"""Training data of supervised steps."""
