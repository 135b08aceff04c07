"""Rollouts of several turns on rows of messages: a wrong answer may be mended once."""
