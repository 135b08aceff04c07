"""What runs inside vLLM's processes, in vLLM's environment: no import here may need another."""
