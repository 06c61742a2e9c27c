"""What goes wrong on ranks, and who says it: errors of ops, reports, waits that end."""
