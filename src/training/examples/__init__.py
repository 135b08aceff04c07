"""Small programs to run, read and copy."""
