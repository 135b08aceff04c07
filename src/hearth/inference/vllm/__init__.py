"""Deployments whose tokens vLLM's own server samples: its process, its replicas, its weights."""
