"""GSM8K as rows for the recipes."""
