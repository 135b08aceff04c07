"""The ``ray`` placement: workers as actors of a Ray cluster, on as many machines as it has."""
