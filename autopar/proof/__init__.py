"""Plans proved: every rank in one process, against the single device."""
