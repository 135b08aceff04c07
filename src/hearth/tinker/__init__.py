"""Tinker's API: what its official client asks for, answered by this platform's workers."""
