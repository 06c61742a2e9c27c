"""The ranks of a run: processes, their groups, the mesh as it runs, and what ranks do together."""
