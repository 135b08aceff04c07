"""What the plugin's errors say, for whoever reads them on the other side."""

UNCHANGED = "the served weights are unchanged"
"""Begins the error of an update that failed before it touched anything."""
