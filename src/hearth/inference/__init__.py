"""One deployment: the engine that samples tokens, and the service that answers for it."""
