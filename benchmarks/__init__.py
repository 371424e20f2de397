"""One script for each question; each prints a table and, with `--json FILE`, writes the same rows as JSON."""
