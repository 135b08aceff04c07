"""Weight snapshots: tensors under an identity, in memory or in folders. No trainer, no engine."""
