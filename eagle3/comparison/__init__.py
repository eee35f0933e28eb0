"""What a run measured, for people: results file, tables and plots."""
