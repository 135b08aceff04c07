"""One update of the policy: losses, KL, turn credit, optimizer steps."""
