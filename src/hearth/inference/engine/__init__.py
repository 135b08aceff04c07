"""Our own continuous-batching engine on torch, over the unmodified ``transformers`` module."""
