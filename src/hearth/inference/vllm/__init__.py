"""Deployments whose tokens vLLM's own server draws: its process, its replicas, its weights."""
