"""Runs plans: the compiled module, parameters at rest and in use, executors, and checkpoints.

Its folders, each of which imports only those to its left:

    failures < ranks < collectives < formats < parameters < execute < pipeline < replicas < model < checkpoint
"""
