"""Code that runs inside vLLM's processes, so it may import only what vLLM's environment has."""
