"""One deployment: the engine that draws tokens, and the service that answers for it."""
