"""Hearth, a self-hosted RL post-training stack: the platform, the SDK and the objectives."""

__version__ = "0.1.0"
