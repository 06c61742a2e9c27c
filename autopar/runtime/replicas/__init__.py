"""Training that is not synchronous: replicas that meet, and their servers."""
