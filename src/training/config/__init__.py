"""What a recipe is told: shared settings, their parts, and the rules that they obey."""
