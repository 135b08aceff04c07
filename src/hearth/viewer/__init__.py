"""``hearth view``: what runs have recorded, read from their files and answered as JSON and pages.

    verb       the command
    app        the routes
    access     who is answered: the key, hosts and origins, headers
    library    which runs there are; run: one run and what is kept of it in memory
    lines      files of JSON lines that grow; metrics, timeline: what they say
    database   the samples' columns in memory; samples, prompts: questions to them
    tokens     one sample, token by token
    compare    where runs differ and part
    exports, reports   files to keep
    live       events while runs grow; jobs: samples asked for again

Nothing here imports torch, and nothing writes into a run's folder. docs/viewer.md has the routes.
"""
