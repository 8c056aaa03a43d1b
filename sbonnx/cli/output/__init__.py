"""Terminal output of the command line: tables, bars, error lines."""
