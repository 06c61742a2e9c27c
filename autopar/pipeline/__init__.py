"""Pipeline stages as data: blocks to cut between, schedules, their simulation in time, what stages cost."""
