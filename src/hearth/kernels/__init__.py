"""Fused loops in C for the CPU, compiled on first use; without a compiler torch does the same."""
