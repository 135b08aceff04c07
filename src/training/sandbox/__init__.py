"""Runs Python programs that nobody trusts: limited, off the network, and out of sight of our files.

``run_code`` runs one; docs/rewards.md has the reward and the tool that are made of it.
"""

from training.sandbox.isolation import Isolation, SandboxError
from training.sandbox.limits import Limits
from training.sandbox.running import CodeResult, find_isolation, run_code

__all__ = ["CodeResult", "Isolation", "Limits", "SandboxError", "find_isolation", "run_code"]
