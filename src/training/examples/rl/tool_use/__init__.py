"""An agent with a calculator, written against OpenAI's client and trained as it is."""
