"""A suite for any server that claims Tinker's API: surface, identities, numbers, load.

It uses the official client and nothing of the server's inside. ``hearth conformance URL`` runs it.
"""
