"""What everything stands on: errors, units, records, files read and written, locks, child processes."""
