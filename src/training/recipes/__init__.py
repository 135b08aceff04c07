"""The recipes: each file is one algorithm, to be read top to bottom and forked."""
