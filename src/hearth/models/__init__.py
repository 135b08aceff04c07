"""Hugging Face causal LMs as Hearth loads them, their LoRA adapters and their export."""
