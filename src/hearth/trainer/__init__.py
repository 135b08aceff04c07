"""One trainer job: the engine that computes, the queue that orders, the service that answers."""
