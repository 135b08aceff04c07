"""The revisions of the schema, one a file."""
