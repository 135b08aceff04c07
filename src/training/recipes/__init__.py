"""The recipes: each file is one algorithm, to be read top to bottom and forked."""

from hearth.collector import collect_rarely

# What all recipes import, torch included: with usual collections it takes a third longer.
with collect_rarely():
    import training.run.begin as _begin  # noqa: F401 - see above
