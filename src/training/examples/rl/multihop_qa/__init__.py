"""Questions of several hops over a small text collection, answered with a search tool (IGPO)."""
