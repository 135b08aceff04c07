"""The control plane: trainer jobs, deployments, checkpoints and models over HTTP."""
