"""Starting, watching and stopping the workers that are trainers and deployments."""
