"""Trainers, deployment and sampler of a run: provisioned, wired, taken down."""
