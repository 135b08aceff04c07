"""Bytes to typed records and back: what crosses between SDK and platform. Never torch."""
