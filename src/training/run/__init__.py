"""The state of a run: checkpoints, evaluation, signal, parity, metrics, watchdog."""
