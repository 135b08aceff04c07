"""What a run has sampled, and when it did what: the files, and how to read them.

    layout    which files there are, and which of them to read
    table     the columns, and how a file is written
    reading   single samples, groups, and the vocabulary
    timeline  spans and events of a run, and whether it still runs

Who only needs names, times or states imports ``layout`` or ``timeline``, which load no pyarrow.
docs/samples.md describes the files for other programs.
"""
