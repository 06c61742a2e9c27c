"""Training that is not synchronous: replicas that synchronise, and their servers."""
