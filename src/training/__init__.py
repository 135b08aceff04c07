"""The cookbook: recipes, the utilities they are built from, and examples to fork."""
