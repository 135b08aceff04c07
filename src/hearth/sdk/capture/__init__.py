"""Completions of a program that only knows OpenAI's API, captured for training.

A ``CaptureServer`` stands between such a program and the deployment: the program is given a
``base_url`` and a key, and after it has ended its session has the token ids and logprobs of every
answer, as chains that a trainer can take.
"""

from hearth.sdk.capture.server import CaptureServer
from hearth.sdk.capture.session import CaptureSession
from hearth.sdk.capture.turns import CapturedTurn, TurnChain

__all__ = ["CaptureServer", "CaptureSession", "CapturedTurn", "TurnChain"]
