"""Single-turn rollouts on pre-tokenized rows: token ids in, token ids out."""
